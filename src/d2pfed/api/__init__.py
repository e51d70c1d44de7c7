"""Runs that live in a directory: settings, plan, ledger, checkpoint, metrics, model."""

from d2pfed.api.job import End, Job, Progress, Settings, Summary
from d2pfed.runs.directory import Checkpoint, RunDirectory

__all__ = ["Checkpoint", "End", "Job", "Progress", "RunDirectory", "Settings", "Summary"]
