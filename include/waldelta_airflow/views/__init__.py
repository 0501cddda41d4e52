"""The plugin's pages: what lakes' bookkeeping tells (waldelta.review), as HTML for those who may read the DAGs."""
