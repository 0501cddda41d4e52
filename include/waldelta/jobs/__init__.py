"""Jobs: each with its stages in order."""

from __future__ import annotations

from waldelta.jobs.pipeline import Pipeline

__all__ = ["Pipeline"]
