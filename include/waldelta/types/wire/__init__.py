"""PostgreSQL's binary formats, turned into the texts of the output functions: one file per
family.
"""
