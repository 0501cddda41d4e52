"""The plugin's pages: what lakes' bookkeeping tells (waldelta.monitoring), as HTML for those who
may read the DAGs.
"""
