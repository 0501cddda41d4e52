"""Replay: derives a target's states again from the change log."""
