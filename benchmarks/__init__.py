"""Measurements behind the figures in the docs; each is a ratio to a baseline of the same run."""
