"""Stage setup: creates or alters publications and slots, after preflight found no problem."""
