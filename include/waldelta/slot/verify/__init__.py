"""Verifies that what landed is what the slot holds or, where it has moved, what it gave."""
