"""Gates: what becomes of rows and tables whose expectations fail."""
