"""Measurements behind the figures in the docs; everything a ratio to a baseline of the same run."""
