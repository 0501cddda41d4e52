"""Stage maintain: keeps targets, change log, ledger and reports small."""
