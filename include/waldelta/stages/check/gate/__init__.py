"""Gates: decide what happens to rows and tables whose expectations fail."""
