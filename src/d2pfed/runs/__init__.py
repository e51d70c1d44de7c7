"""The driver of a run: resume, round, record, checkpoint, conclude, report."""

from d2pfed.runs.directory import Checkpoint, RunDirectory
from d2pfed.runs.records import (
    ArrayShape,
    End,
    ExchangeRecord,
    RoundRecord,
    RunSettings,
    RunSummary,
    SiloRecord,
    SiloTable,
    TrainingAudit,
)
from d2pfed.runs.run import Listener, Run, open_run
