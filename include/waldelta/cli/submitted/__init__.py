"""The application that spark-submit runs, in a folder of its own: spark-submit puts this folder
first on the path, where a module's name would hide one of the standard library.
"""
