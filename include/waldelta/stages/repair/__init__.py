"""Repairs targets by the rows that differ, without copying them anew."""
