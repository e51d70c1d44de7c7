"""Writing a report: whole files only, the page last."""

from pathlib import Path

from d2pfed.errors import ConfigError
from d2pfed.ledger.files import replace_file, require_no_link
from d2pfed.runs.report.page import render
from d2pfed.runs.report.panels import panels
from d2pfed.runs.report.plots import draw
from d2pfed.runs.report.run_report import RunReport

_MODE = 0o666  # as the umask allows: a report is for others to read


def write_report(report: RunReport, directory: Path) -> Path:
    """Write report.html, and each plot as plots/NAME.png and .svg; return the page's path.

    A crash leaves each file old or new, never a part; equal reports give equal bytes.
    """
    drawn = [(panel, draw(panel.plot)) for panel in panels(report)]
    page = render(report, drawn)
    try:
        plots = make_plots(directory)
        for panel, drawing in drawn:
            replace_file(plots / f"{panel.plot.name}.png", drawing.png, mode=_MODE)
            replace_file(plots / f"{panel.plot.name}.svg", drawing.svg.encode(), mode=_MODE)
        replace_file(directory / "report.html", page.encode(), mode=_MODE)
    except OSError as error:
        raise ConfigError(f"cannot write the report in {directory}: {error.strerror}") from error
    return directory / "report.html"


def make_plots(directory: Path) -> Path:
    """Return the folder of a run's plots, made if there is none."""
    plots = directory / "plots"
    require_no_link(plots)
    plots.mkdir(exist_ok=True)
    return plots
