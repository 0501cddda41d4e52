"""The parts of repair that sync and apply use too: which rows differ from those expected, and what
becomes of a killed repair.
"""
