"""Measures columns, profiles, duplicate keys and references of a target."""
