"""The d2pfed command: parse, call one function, print."""

import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from typer.core import TyperGroup

from d2pfed.errors import D2PFedError, closest, needs_extra

if TYPE_CHECKING:
    from click import Command, Context, HelpFormatter

# The line is what the list of commands shows.
COMMANDS = {
    "plan": "Show what a privacy target requires: noise, bits, bytes and epsilons.",
    "train": "Train a model privately over simulated clients, or resume a run.",
    "report": "Write the report of a run again.",
    "audit": "Attack what is claimed: the mechanism, a training run, a released model.",
    "account": "Show the epsilon that given noise, sampling and rounds amount to.",
    "ledger": "Show, verify or create the record of releases.",
    "certify": "Write or check a signed statement of what a run guarantees.",
    "client": "Set up and maintain a client of a federation.",
    "deploy": "Show whether the server of a federation works.",
    "roster": "Sign and check the list of a federation's clients.",
    "data": "Fetch data sets, or show where they are.",
}
# A command's module is loaded when it is called: the one of its name, or one that has several commands.
MODULES = {
    **dict.fromkeys(("plan", "account"), "plan"),
    **dict.fromkeys(("client", "deploy", "roster"), "federation"),
    **dict.fromkeys(("report", "certify", "data"), "files"),
}
TRAIN_PACKAGES = ("torch", "sklearn", "safetensors", "matplotlib", "jinja2", "mlxtend")  # of the extra `train`
_LEAST_MEMORY = 400 << 20  # bytes of addresses: with less, OpenBLAS may wait for memory forever as scipy loads
START = """\
Federated learning with secure aggregation and distributed differential privacy.

To begin:
  d2pfed plan                               what a privacy target requires
  d2pfed train                              the main job, about a minute
  d2pfed train --task digits --epsilon 10   a small run on bundled data
  d2pfed report runs/NAME                   the report of a run
  d2pfed --help                             all commands
  d2pfed COMMAND --help                     all options of one
"""


class LazyGroup(TyperGroup):
    """A group that imports the module of a command only when it is called."""

    def list_commands(self, ctx: "Context") -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of the commands in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: "Context", cmd_name: str) -> "Command | None":  # noqa: ARG002 - click's signature
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"{__name__}.{MODULES.get(cmd_name, cmd_name)}")
        command = typer.main.get_command(getattr(module, f"{cmd_name}_app" if cmd_name in MODULES else "app"))
        command.name = cmd_name
        return command

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:  # noqa: ARG002 - click's signature
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=LazyGroup,
    help="Federated learning with secure aggregation and distributed differential privacy.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def start(
    context: typer.Context,
    wanted: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning with secure aggregation and distributed differential privacy."""
    if wanted:
        print(f"d2pfed {version('d2pfed')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(START, end="")


def main() -> None:
    """Run the command line."""
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _LEAST_MEMORY:
        _fail("d2pfed", "there is too little memory for this command (see `ulimit -v`)")
    run(app, "d2pfed")


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; on bad input print one line that says rule and value, and exit with 2."""
    # Else numba, where colorama is installed, leaves an escape sequence on the terminal at exit.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
    # Else worker processes that start afresh look for Python's own modules in the current directory first, and that may
    # be a run that somebody else has made.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if isinstance(sys.stdout, TextIOWrapper):  # the name of a file may be no text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # The parser turns Ctrl-C into a status that it returns; a command itself returns nothing.
        with _interrupted(), needs_extra("train", *TRAIN_PACKAGES):
            status = app(sys.argv[1:], prog_name=name, standalone_mode=False)
        if status:
            sys.exit(status)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except D2PFedError as error:
        _fail(name, str(error))
    except (MemoryError, ImportError, RuntimeError) as error:
        # A library that does not fit, and torch, say it in words of their own.
        if not (isinstance(error, MemoryError) or re.search("map segment|allocate memory", str(error))):
            raise
        _fail(name, "there is too little memory for this command (see `ulimit -v`)")
    except OSError as error:  # a folder that is a file, a full disk
        _fail(name, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        # The parser's complaints know how to name the option; they have no common public type.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without a command
            print(error.format_message())
            sys.exit(0)
        complaint, context = error.format_message(), getattr(error, "ctx", None)
        if context is None:
            _fail(name, complaint)
        # The nearest name that would do: the parser's own suggestions differ from version to version, some come twice.
        if found := re.match(r"No such (command|option):? '?([^'\s]*?)'?\.?(?:\s|$)", complaint):
            command = context.command
            known = command.list_commands(context) if isinstance(command, TyperGroup) else []
            if found[1] == "option":
                known = [each for parameter in command.params for each in parameter.opts]
            near = "".join(f" Did you mean '{each}'?" for each in closest(found[2], known))
            complaint = f"No such {found[1]} '{found[2]}'.{near}"
        stop = "" if complaint.endswith((".", "?")) else "."
        _fail(name, f"{complaint}{stop} See `{context.command_path} --help`.")


@contextmanager
def _interrupted() -> Iterator[None]:
    """Exit with 130 after Ctrl-C, also where a library that is being loaded loses it or raises another error."""
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else a job in the background, which is to ignore it
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if is_interrupted:
            sys.exit(130)


def _fail(name: str, text: str) -> NoReturn:
    # What a file says must not speak to the terminal.
    said = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    print(f"{name}: {said}", file=sys.stderr)
    sys.exit(2)
