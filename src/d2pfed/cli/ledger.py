"""`d2pfed ledger`: what was released and what it cost."""

import typer

ledger = typer.Typer(help="Show or verify the record of releases.", no_args_is_help=True)
