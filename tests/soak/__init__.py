"""Faults at every step, and random kills under load: what `make soak` runs and docs/faults.md is
written from.
"""
