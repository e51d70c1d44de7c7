"""Runs that live in a directory: settings, plan, ledger, checkpoint, metrics, model."""

from d2pfed.directory import Checkpoint, RunDirectory
from d2pfed.run.job import End, Job, Progress, Settings, Summary

__all__ = ["Checkpoint", "End", "Job", "Progress", "RunDirectory", "Settings", "Summary"]
