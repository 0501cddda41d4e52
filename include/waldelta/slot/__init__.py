"""The replication slot: read, acknowledge, recover, follow; its health and failover."""
