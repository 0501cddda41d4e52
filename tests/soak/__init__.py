"""Faults at every step, and random kills under load.

`make soak` runs them and writes docs/explanation/guarantees.md from the results.
"""
