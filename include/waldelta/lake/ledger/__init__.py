"""The ledger: Delta tables that record what runs did and what state each target is in."""
