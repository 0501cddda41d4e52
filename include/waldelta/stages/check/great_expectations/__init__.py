"""Great Expectations: importing it, building suites, running them, expectations of our own."""
