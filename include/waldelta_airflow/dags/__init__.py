"""The DAGs of each pipeline file, built by a factory."""
