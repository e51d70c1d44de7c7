"""The driver of a run: resume, round, record, checkpoint, conclude, report."""

from d2pfed.runs.directory import Checkpoint, RunDirectory, open_ledger
from d2pfed.runs.records import (
    ArrayShape,
    End,
    ExchangeRecord,
    RoundRecord,
    RunSettings,
    RunSummary,
    TrainingAudit,
)
from d2pfed.runs.run import Evaluator, Federation, Listener, Means, Run, StopRule, named_arrays, open_run

__all__ = [
    "RunSettings",
    "ArrayShape",
    "open_run",
    "Run",
    "Federation",
    "Means",
    "Evaluator",
    "Listener",
    "StopRule",
    "RoundRecord",
    "ExchangeRecord",
    "RunSummary",
    "TrainingAudit",
    "End",
    "RunDirectory",
    "Checkpoint",
    "open_ledger",
    "named_arrays",
]
