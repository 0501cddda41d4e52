"""The embedded stack and the demo on real flights."""
