"""The kinds of expectations, and the suite of them that each target must meet."""
