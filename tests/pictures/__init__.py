"""The pictures of docs/reference/ui.md: lakes of made-up pipelines, shown by a browser."""
