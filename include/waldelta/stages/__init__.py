"""The stages of a run, one folder each: setup, land, sync, check, apply,
repair, maintain."""
