"""Reports as HTML pages: Data Docs, reconciliation pages, their index."""
