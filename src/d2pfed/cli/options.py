"""Command-line options: made from the fields of settings classes, or declared here once for several commands."""

import dataclasses
import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from d2pfed.errors import ConfigError, closest
from d2pfed.fields import DATA, RUN, Description, default_in_words, descriptions
from d2pfed.plan import DEFAULT_TARGET

if TYPE_CHECKING:
    from click import Context, HelpFormatter

    from d2pfed.simulation import Dropouts

# The fields of a privacy target in which the commands' default differs from the class's own.
TARGET_DEFAULTS = {
    name: getattr(DEFAULT_TARGET, name)
    for name in ("against", "sampling", "dropouts", "colluders", "rotation", "compression", "longest_mean")
}
SECTIONS = ("Privacy", "Training", "Data", "Run")  # in the order of the help


def option(text: str, section: str = RUN, *names: str, metavar: str | None = None) -> Any:  # noqa: ANN401 - typer's own type
    """Return an option that a section of the help lists; its text states the default in words."""
    return typer.Option(*names, help=text, rich_help_panel=section, show_default=False, metavar=metavar)


AsJson = Annotated[bool, option("Print JSON and nothing else on standard output.", RUN, "--json")]
DataDirectory = Annotated[
    Path | None, option("Directory of the data sets. Default: D2PFED_DATA, or the cache.", DATA, "--data")
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldOptions:
    """The options of a command that are made from the fields of a settings class."""

    kind: type
    prefix: str = ""  # before every name, so that two classes may have fields of the same name
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)  # where they differ from the class's
    unset: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what a default of None stands for
    left_out: tuple[str, ...] = ()  # fields that the command sets itself
    only: tuple[str, ...] = ()  # fields that the command has; empty: all

    @property
    def fields(self) -> tuple[Description, ...]:
        """The fields that become options, with this command's defaults."""
        return tuple(
            dataclasses.replace(
                each,
                default=self.defaults.get(each.name, each.default),
                unset=self.unset.get(each.name, each.unset),
                optional=each.optional or each.name in self.unset,
            )
            for each in descriptions(self.kind)
            if each.name not in self.left_out and (not self.only or each.name in self.only)
        )

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the parameters that declare these options to typer."""
        for each in self.fields:
            kind: Any = each.type if each.parse is None else str
            metavar = None
            if each.parse is not None:
                metavar = each.type.__name__.upper()
            elif issubclass(kind, Enum):
                metavar = "|".join(str(one.value) for one in kind)
                kind = str  # the settings class refuses a wrong name, and lists the right ones
            default = str(each.default.value) if isinstance(each.default, Enum) else each.default
            if default is None:
                kind = Optional[kind]  # noqa: UP045 - built at run time
            elif each.parse is not None:
                default = str(default)
            name = f"{self.prefix}{each.name}"
            flag = f"--{name.replace('_', '-')}"
            declared = option(f"{each.help}{default_in_words(each)}", each.section, flag, metavar=metavar)
            annotation = Annotated[kind, declared]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_fields(*sources: FieldOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the options of settings classes to a command.

    The command takes one dictionary of values for each class, and its own options by keyword.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = list(signature.parameters.values())[len(sources) :]

        @wraps(command)
        def called(**given: Any) -> None:  # noqa: ANN401 - typer has converted them
            values = [
                {each.name: given.pop(f"{source.prefix}{each.name}") for each in source.fields}
                for source in sources
            ]
            command(*values, **given)

        parameters = [each for source in sources for each in source.parameters()] + own
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


class SectionedCommand(TyperCommand):
    """A command whose help lists its options by section."""

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write one list of options for each section; those without one come last."""
        lists: dict[str, list[tuple[str, str]]] = {section: [] for section in ("Arguments", *SECTIONS)}
        declared = inspect.signature(self.callback).parameters if self.callback else {}
        told = {  # where an argument is declared: click from 8.5 on loses what typer hands it
            name: each.help or ""
            for name, parameter in declared.items()
            for each in getattr(parameter.annotation, "__metadata__", ())
            if isinstance(each, typer.models.ArgumentInfo)
        }
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is None:
                continue
            if each.param_type_name == "argument":
                lists["Arguments"].append((record[0], told.get(each.name or "", "")))
                continue
            panel = getattr(each, "rich_help_panel", None) or RUN
            # Typer escapes brackets as if rich printed them.
            lists.setdefault(panel, []).append((record[0], record[1].replace("\\[", "[")))
        for section, records in lists.items():
            if records:
                with formatter.section(section):
                    formatter.write_dl(records)


class Group(TyperGroup):
    """A group of commands whose help describes each in a whole sentence."""

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """List the commands, without cutting what is said of them."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(1000)) for name, each in found.items() if each])


def application(about: str | None = None, kind: type[TyperGroup] = Group) -> typer.Typer:
    """Return the app of a command, or of a group of commands if there is something to say about it."""
    group: dict[str, Any] = {} if about is None else {"cls": kind, "help": about, "no_args_is_help": True}
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False, **group)


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Take the defaults of a command from a TOML file; the callback of `--config`.

    A key is the name of an option, with underscores. What the command line says overrides the file.
    """
    if file is None:
        return None
    from d2pfed.ledger.files import read_given  # noqa: PLC0415 - few commands read a file

    try:
        found = tomllib.loads(read_given(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}") from None
    known = [each.name for each in context.command.params if each.name and each.name not in ("config", "help")]
    for key, value in found.items():
        if key not in known:
            near = [f"the nearest name is {name}" for name in closest(key.replace("-", "_"), known)]
            raise ConfigError(f"{file}: there is no option {key}; {near[0] if near else '--help lists them'}")
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{file}: {key} must be a string, a number, true or false, got {value!r}")
    # As text: the parser would cut 1.5 rounds down to 1.
    context.default_map = {key: str(value) for key, value in found.items()}
    return file


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file with options by name, such as cohort_size = 100; the command line overrides it.",
        rich_help_panel=RUN,
        is_eager=True,
        callback=read_config,
        show_default=False,
    ),
]


def parse_dropouts(text: str) -> "Dropouts":
    """Return the simulated losses: one fraction before the third exchange, or four, one before each."""
    from fractions import Fraction  # noqa: PLC0415 - as below

    from d2pfed.simulation import EXCHANGES, Dropouts  # noqa: PLC0415 - slow to load, and the help needs none of it

    try:
        rates = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"lost must be a fraction or four of them with commas between, got {text}") from None
    if len(rates) not in (1, len(EXCHANGES)):
        raise ConfigError(f"lost must be one fraction or {len(EXCHANGES)}, got {len(rates)}")
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"lost must be in [0, 1], got {text}")
    return Dropouts(masked=rates[0]) if len(rates) == 1 else Dropouts(*rates)
