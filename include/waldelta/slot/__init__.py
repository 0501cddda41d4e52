"""The replication slot: reading, acknowledging and recovering it, following a promotion; its
health.
"""
