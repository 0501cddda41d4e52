"""REHEARSE: a migration on a throw-away server, with the pipeline and a lake behind it."""
