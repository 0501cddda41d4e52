"""Stage land: appends the slot's messages to the change log."""
