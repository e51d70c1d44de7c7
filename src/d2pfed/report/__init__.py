"""The report of a run: a page that stands alone, and its plots as files."""

from d2pfed.report.reading import read_story
from d2pfed.report.story import RoundPoint, Story
from d2pfed.report.writing import write_report

__all__ = ["RoundPoint", "Story", "read_story", "write_report"]
