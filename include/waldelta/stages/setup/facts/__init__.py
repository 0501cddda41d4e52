"""Facts about the source that setup and preflight decide by."""
