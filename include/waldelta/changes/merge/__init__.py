"""Merges staged net changes into a target, as one commit."""
