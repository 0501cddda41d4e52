"""Which targets a pipeline has, what each is fed by, and where each is in its lifecycle."""
