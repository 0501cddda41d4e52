"""Reads the slot: the read request, the read window, and what PostgreSQL can't decode."""
