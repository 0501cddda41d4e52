"""Reads the slot: what a read asks for, how much at once, and what PostgreSQL itself fails to
decode.
"""
