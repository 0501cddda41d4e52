"""Decodes raw messages and collapses them to net changes by key."""
