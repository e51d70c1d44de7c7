"""A setting is described once, and the description reaches help(), command line, configuration file and report."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum

import pytest
import typer
from typer.testing import CliRunner

from d2pfed.accounting import RELEASED, SERVER, Adjacency, Sampling, colluding
from d2pfed.cli import COMMANDS, app, main
from d2pfed.cli.options import Config, FieldOptions, SectionedCommand, with_fields
from d2pfed.errors import ConfigError, MissingExtra, needs_extra
from d2pfed.fields import RUN, TRAINING, check_types, descriptions, documented, setting
from d2pfed.learning import LocalTraining, Optimizer
from d2pfed.plan import MechanismName, PrivacyTarget, RotationName
from d2pfed.secagg.trust import Consistency
from d2pfed.training import ServerOptimizer

SMALL = {"dimension": 10, "population": 100, "cohort_size": 10, "rounds": 2}
CLASSES = (PrivacyTarget, LocalTraining, ServerOptimizer)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_is_described_in_help(kind):
    assert [each.name for each in descriptions(kind)] == [item.name for item in dataclasses.fields(kind)]
    for each in descriptions(kind):
        assert f"    {each.name}: {each.help}" in kind.__doc__
        assert each.help.endswith(".")
        assert each.unset or each.default is not None


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class Paint:
    """A settings class."""

    layers: int = setting(2, "Number of layers.", TRAINING)
    colour: Colour = setting(Colour.RED, "The colour.", RUN)
    gloss: float | None = setting(None, "The gloss.", RUN, unset="that of the colour")

    def __post_init__(self) -> None:
        check_types(self)


def painter():
    app, seen = typer.Typer(rich_markup_mode=None, add_completion=False), []

    @app.command(cls=SectionedCommand)
    @with_fields(FieldOptions(kind=Paint))
    def paint(given: dict, *, config: Config = None) -> None:
        seen.append(Paint(**given))

    return app, seen


def test_a_new_option_is_one_edit(tmp_path):
    """The line of a field is all that is written: it is in help(), in the command's help and in the file."""
    app, seen = painter()
    assert "    gloss: The gloss. Default: that of the colour." in Paint.__doc__
    text = CliRunner().invoke(app, ["--help"]).output
    assert "--gloss FLOAT" in text
    assert "The gloss. Default: that of the colour." in " ".join(text.split())
    (tmp_path / "paint.toml").write_text('gloss = 0.5\ncolour = "blue"\nlayers = 3\n')
    ended = CliRunner().invoke(app, ["--config", str(tmp_path / "paint.toml"), "--layers", "4"])
    assert ended.exit_code == 0, ended.output
    assert seen == [Paint(layers=4, colour=Colour.BLUE, gloss=0.5)]  # the command line overrides the file


def test_the_help_is_in_sections(tmp_path):
    text = CliRunner().invoke(painter()[0], ["--help"]).output
    assert text.index("Training:") < text.index("--layers") < text.index("Run:") < text.index("--colour")
    assert "[default" not in text


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("colours = 'red'", "there is no option colours; the nearest name is colour"),
        ("layer-s = 1", "there is no option layer-s; the nearest name is layers"),
        ("[paint]\nlayers = 1", "there is no option paint"),
        ("layers = [1]", "layers must be a string, a number, true or false, got [1]"),
        ("layers = ", "is not a TOML file"),
        ("layers = 1.5", "'1.5' is not a valid int"),
        ("layers = true", "'True' is not a valid int"),
        ("colour = 'green'", "colour must be one of red, blue, got 'green'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, content, rule):
    (tmp_path / "paint.toml").write_text(content)
    ended = CliRunner().invoke(painter()[0], ["--config", str(tmp_path / "paint.toml")])
    assert ended.exit_code != 0
    assert rule in f"{ended.output} {ended.exception}"


def test_names_are_accepted_for_every_enumeration():
    named = PrivacyTarget(
        **SMALL,
        sampling="once",
        mechanism="skellam",
        against="server",
        adjacency="zero-out",
        consistency="signed",
        rotation="phase",
    )
    assert named == PrivacyTarget(
        **SMALL,
        sampling=Sampling.ONCE,
        mechanism=MechanismName.SKELLAM,
        against=SERVER,
        adjacency=Adjacency.ZERO_OUT,
        consistency=Consistency.SIGNED,
        rotation=RotationName.PHASE,
    )
    assert named.sampling is Sampling.ONCE
    assert PrivacyTarget(**SMALL).against is RELEASED
    assert PrivacyTarget(**SMALL, against="colluding(3)").against == colluding(3)
    assert LocalTraining(optimizer="adam").optimizer is Optimizer.ADAM


@pytest.mark.parametrize(
    ("kind", "wrong", "rule"),
    [
        (PrivacyTarget, {"mechanism": "nope"}, "mechanism must be one of centered, .*, got 'nope'"),
        (PrivacyTarget, {"mechanism": Sampling.ONCE}, "mechanism must be one of"),
        (PrivacyTarget, {"against": "colluding()"}, "against must be released, server"),
        (PrivacyTarget, {"against": 3}, "against must be of the type Observer or its name, got 3"),
        (PrivacyTarget, {"rounds": "4"}, "rounds must be a whole number, got '4'"),
        (PrivacyTarget, {"rounds": 4.0}, "rounds must be a whole number, got 4.0"),
        (PrivacyTarget, {"rounds": True}, "rounds must be a whole number, got True"),
        (PrivacyTarget, {"spare": "x"}, "spare must be a whole number or None, got .x."),
        (PrivacyTarget, {"bits": "8"}, "bits must be a whole number or None, got '8'"),
        (PrivacyTarget, {"epsilon": "1"}, "epsilon must be a number, got '1'"),
        (PrivacyTarget, {"epsilon": None}, "epsilon must be a number, got None"),
        (PrivacyTarget, {"epsilon": 10**400}, "epsilon must be a number that a float holds, got a number of"),
        (PrivacyTarget, {"delta": "x"}, "delta must be a number or None, got 'x'"),
        (
            LocalTraining,
            {"optimizer": "nope"},
            "optimizer must be one of sgd, adam, adamw, rmsprop or a function, got 'nope'",
        ),
        (LocalTraining, {"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        (ServerOptimizer, {"lr": "fast"}, "lr must be a number, got 'fast'"),
    ],
)
def test_a_wrong_type_is_refused_with_rule_and_value(kind, wrong, rule):
    given = (SMALL if kind is PrivacyTarget else {}) | wrong
    with pytest.raises(ConfigError, match=rule) as refusal:
        kind(**given)
    assert isinstance(refusal.value, ValueError)


def test_whole_numbers_of_numpy_are_whole_numbers():
    import numpy as np  # noqa: PLC0415

    assert type(PrivacyTarget(**SMALL | {"rounds": np.int64(2)}).rounds) is int
    assert type(PrivacyTarget(**SMALL, epsilon=2).epsilon) is float


BLOCKED = """
import sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
from d2pfed.cli import main
main()
"""


@pytest.mark.parametrize(
    ("blocked", "line", "package"),
    [
        ("torch", "train --task digits", "torch"),
        ("sklearn", "train --task digits", "sklearn"),
        ("safetensors", "train --task digits", "safetensors"),
        ("matplotlib", "report runs/x", "matplotlib"),
        ("torch", "data fetch infimnist", "torch"),
        (
            "ray",
            (
                "train --task digits --population 40 --cohort-size 20 --rounds 1 --backend ray --epsilon 30 "
                "--against released --sampling fixed --dropouts 0 --colluders 0"
            ),
            "ray",
        ),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(tmp_path, blocked, line, package):
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED, blocked, *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    extra = "ray" if package == "ray" else "train"
    assert ended.returncode == 2, ended.stderr
    assert f"d2pfed: {package} is not installed; run: pip install 'd2pfed[{extra}]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_defect_in_an_import_is_not_a_missing_extra():
    with pytest.raises(ModuleNotFoundError, match="d2pfed_nothing"), needs_extra("train", "torch"):
        import d2pfed_nothing  # noqa: PLC0415
    with pytest.raises(MissingExtra, match=r"d2pfed\[some\]"), needs_extra("some", "d2pfed_nothing"):
        import d2pfed_nothing.deeper  # noqa: F401, PLC0415


@pytest.mark.parametrize("line", ["ledger create --help", "client init --help", "roster sign --help"])
def test_no_help_shows_an_escape(line):
    ended = CliRunner().invoke(app, line.split())
    assert ended.exit_code == 0
    assert "Arguments:" in ended.output
    assert "[required]" in ended.output or "[default: " in ended.output
    assert "\\" not in ended.output


@pytest.mark.parametrize("name", ["ledger", "client", "roster", "data"])
def test_a_group_without_a_command_prints_its_help(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["d2pfed", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert "Commands" in out
    assert COMMANDS[name] in " ".join(out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_list_has_a_help(name):
    ended = CliRunner().invoke(app, [name, "--help"])
    assert ended.exit_code == 0
    assert f"{name}" in ended.output.splitlines()[0] + ended.output.splitlines()[1]
    assert "[default" not in ended.output
