"""Stage setup: creates or alters publications and slots, after preflight found nothing against
it.
"""
