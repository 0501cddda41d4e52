"""The pictures of the pages in docs/ui.md: made-up pipelines' lakes, and a browser that looks at
them.
"""
