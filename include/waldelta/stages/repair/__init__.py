"""Repairs targets by merging only the rows that differ, without a new copy."""
