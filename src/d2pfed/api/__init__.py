"""What a Python user calls; its names are imported when they are first used, since statistics need no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from d2pfed.errors import needs_extra

if TYPE_CHECKING:
    from d2pfed.api.fitting import fit
    from d2pfed.api.job import Job
    from d2pfed.api.result import FitResult
    from d2pfed.api.settings import EarlyStop, RunOptions, Training

_MODULES = {"fit": "fitting", "FitResult": "result", "Job": "job"}
_MODULES |= dict.fromkeys(("EarlyStop", "Training", "RunOptions"), "settings")


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_extra("train", "jinja2", "matplotlib", "safetensors", "torch"):
        return getattr(import_module(f"d2pfed.api.{_MODULES[name]}"), name)
