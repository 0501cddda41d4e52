"""Preflight: finds what would fail or mislead later, before anything is changed."""
