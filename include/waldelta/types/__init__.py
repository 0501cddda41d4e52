"""How values of PostgreSQL's types are read into Arrow: one file per family."""
