"""Parses a filter's text and PostgreSQL's analyzed expression trees."""
