"""Publication drift: what changed between catalog states, and what a target needs because of it."""
