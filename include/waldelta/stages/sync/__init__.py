"""Stage sync: copies the initial snapshot of tables that need it."""
