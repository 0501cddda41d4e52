"""The Airflow DAGs of every pipeline file: <pipeline>_setup, _initial_sync, _cdc, _resync,
_reconcile, _quarantine and _maintenance.
"""

from waldelta_airflow import pipelines

globals().update(pipelines())
