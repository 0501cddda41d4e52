"""The Airflow side of waldelta: DAG factory, operators, pages."""
