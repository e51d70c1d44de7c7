"""`d2pfed report`: the page of a run, written again from its files."""

from pathlib import Path
from typing import Annotated

import typer

from d2pfed.cli.options import TRAIN_PACKAGES, AsJson, SectionedCommand, application
from d2pfed.cli.show import out, print_json
from d2pfed.errors import needs_extra

app = application()


@app.command(cls=SectionedCommand)
def report(
    run: Annotated[Path, typer.Argument(help="The run's directory, such as runs/NAME.")], *, json: AsJson = False
) -> None:
    """Write a run's report.html and its plots again, from its plan, settings, metrics and summary."""
    with needs_extra("train", *TRAIN_PACKAGES):
        from d2pfed.runs.report import read_report, write_report  # noqa: PLC0415 - an extra

    page = write_report(read_report(run), run)
    if json:
        print_json({"report": str(page), "plots": sorted(str(file) for file in (run / "plots").iterdir())})
    else:
        out().print(f"The report is in {page}.", soft_wrap=True)
