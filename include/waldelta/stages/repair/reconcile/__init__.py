"""Reconciliation: compares a target with its source by checksums that both sides compute."""
