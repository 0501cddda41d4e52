"""Target modes: what a target keeps of rows that the source changed or deleted, one class each.

A class says everything in which its mode differs from others: facts, and SQL text. It is loaded
without PySpark. What is typed here of later packages is passed in by them.
"""
