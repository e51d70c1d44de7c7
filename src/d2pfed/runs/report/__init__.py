"""The report of a run: a page that stands alone, and its plots as files."""

from d2pfed.runs.report.run_report import AUDIT, BASELINE, Baseline, RunReport, read_report
from d2pfed.runs.report.writing import make_plots, write_report

__all__ = ["AUDIT", "BASELINE", "Baseline", "RunReport", "make_plots", "read_report", "write_report"]
