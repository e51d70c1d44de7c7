"""What a Python user calls."""

from d2pfed.api.job import Job, Settings, TaskEvaluator

__all__ = ["Job", "Settings", "TaskEvaluator"]
