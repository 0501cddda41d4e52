"""What Airflow learns of a run: metrics, assets, lineage, notifications."""
