"""Launchers for spark-submit, one per job; the jobs themselves are in ``waldelta.jobs``."""
