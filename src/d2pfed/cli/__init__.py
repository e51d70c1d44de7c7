"""The d2pfed command: parse, call one function, print."""

import sys

import typer

from d2pfed.cli.account import account
from d2pfed.cli.client import client
from d2pfed.cli.data import data
from d2pfed.cli.ledger import ledger
from d2pfed.cli.plan import plan
from d2pfed.cli.report import report
from d2pfed.cli.roster import roster
from d2pfed.cli.train import train
from d2pfed.errors import D2PFedError

app = typer.Typer(
    help="Federated learning with secure aggregation and distributed differential privacy.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)
for command in (plan, train, account, report):
    app.command()(command)
for group, name in ((ledger, "ledger"), (client, "client"), (roster, "roster"), (data, "data")):
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line."""
    run(app, "d2pfed")


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; on bad input print one line that says rule and value, and exit with 2."""
    try:
        app(sys.argv[1:] or ["--help"], standalone_mode=False, prog_name=name)
    except typer.Abort:
        sys.exit(130)
    except (D2PFedError, OSError) as error:  # the latter: a folder that is a file, a full disk
        _fail(name, str(error))
    except Exception as error:
        # The parser's complaints know how to name the option; they have no common public type.
        if not hasattr(error, "format_message"):
            raise
        _fail(name, error.format_message())


def _fail(name: str, text: str) -> None:
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)
