"""Reads a lake's bookkeeping for people: runs, lag, freshness, verdicts; without a JVM, a source or
Airflow.

Every function takes a ``Ledger`` and returns plain values; its cost doesn't grow with the
length of the history.
"""
