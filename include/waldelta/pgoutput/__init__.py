"""PostgreSQL's logical replication messages (the output plugin pgoutput), read column by column."""
