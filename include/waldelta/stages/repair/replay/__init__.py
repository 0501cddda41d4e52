"""Replay: which runs, and which rows they touched."""
