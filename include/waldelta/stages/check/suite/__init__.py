"""Plans the expectation suite of each target."""
