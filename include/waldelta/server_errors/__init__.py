"""What errors of servers mean: PostgreSQL's by SQLSTATE, and the texts that have no code."""
