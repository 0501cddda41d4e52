"""Rows of the source as one exported snapshot sees them."""
