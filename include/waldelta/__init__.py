"""PostgreSQL logical replication into Delta Lake: what needs neither Spark nor Airflow."""
