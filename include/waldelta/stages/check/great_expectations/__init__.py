"""Great Expectations: imports it, builds and runs suites, and adds expectations of our own."""
