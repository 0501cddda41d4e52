"""Facts about the source on which setup and preflight base their decisions."""
