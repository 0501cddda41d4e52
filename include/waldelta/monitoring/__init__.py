"""What a lake's bookkeeping tells people: runs, lag, freshness, verdicts; read without a JVM, a
source or Airflow.

Everything here takes a ``Bookkeeping`` and gives plain values; what it costs doesn't grow with the
length of the history.
"""
