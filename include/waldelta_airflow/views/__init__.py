"""The plugin's pages: the lakes' bookkeeping (waldelta.monitoring) as HTML, for readers of the
DAGs.
"""
