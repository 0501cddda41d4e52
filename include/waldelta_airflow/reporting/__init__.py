"""What Airflow gets from a run: metrics, assets, lineage, notifications."""
