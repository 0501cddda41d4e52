"""The context of one run: its job, locks, connections, result and source load."""
