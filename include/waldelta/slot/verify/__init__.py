"""Verifies that what landed is what the slot holds, before the slot moves."""
