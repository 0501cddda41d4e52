"""Airflow's plugin of waldelta for an environment that has its modules, but no entry point of it.

Airflow executes this file itself, so nothing imports it.
"""

from waldelta_airflow import plugin

# Airflow registers every plugin class that it finds here.
if not plugin.is_entry_point():
    WaldeltaPlugin = plugin.WaldeltaPlugin
