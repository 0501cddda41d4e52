"""Questions to the PostgreSQL server: connections, catalogs, published tables and columns, lock
waits.
"""
