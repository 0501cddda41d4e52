"""Stage apply: merges landed changes into targets, in apply batches."""
