"""Constraints of the source that become expectations."""
