"""Stands in for the real job: first on PYTHONPATH, it is what `python -m waldelta` runs."""
