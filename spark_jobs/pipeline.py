"""Re-exports ``Pipeline`` for code outside this repository: ``from waldelta.jobs.pipeline import
Pipeline``.
"""

from waldelta.jobs import Pipeline

__all__ = ["Pipeline"]
