"""The report of a run: a page that stands alone, and its plots as files."""

from d2pfed.runs.report.reading import read_story
from d2pfed.runs.report.story import RoundPoint, Story
from d2pfed.runs.report.writing import write_report

__all__ = ["RoundPoint", "Story", "read_story", "write_report"]
