"""Preflight: what would fail or mislead later, found before anything is changed."""
