"""Draft: proposes a pipeline file, and the grants for it, from the tables that a database has."""
