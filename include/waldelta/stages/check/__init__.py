"""Stage check: validates targets by expectations, and decides by gates."""
