"""What an engineer writes: the pipeline file and expectation files, parsed and validated."""
