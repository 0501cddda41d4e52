"""The command line and the fork server that runs jobs for Airflow."""
