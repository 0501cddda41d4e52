"""Turns raw messages into net changes and merges them into targets."""
