"""Turns PostgreSQL's binary formats into the texts of the output functions: one file per family."""
