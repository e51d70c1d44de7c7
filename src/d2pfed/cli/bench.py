"""`d2pfed bench`: speed against peers and limits, measured in one run."""

import typer

bench = typer.Typer(help="Measure speed against peers and limits in one run.", no_args_is_help=True)
