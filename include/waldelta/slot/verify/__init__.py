"""Verifies that what landed equals what the slot holds or, after a move, what it returned."""
