"""What a Python user calls."""

from d2pfed.errors import needs_extra

with needs_extra("train", "jinja2", "matplotlib", "safetensors", "torch"):
    from d2pfed.api.fitting import fit
    from d2pfed.api.job import Job, Settings, TaskEvaluator
    from d2pfed.api.result import FitResult
    from d2pfed.api.stopping import EarlyStop

__all__ = ["fit", "FitResult", "EarlyStop", "Job", "Settings", "TaskEvaluator"]
