"""What a person sees: no escapes where none are wanted, help that fits, and one line for each mistake."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from d2pfed.cli import COMMANDS
from support.commands import run_command

ENTRY = "import sys; sys.argv[0] = 'd2pfed'; from d2pfed.cli import main; main()"
TINY = (
    "train --task digits --model logistic --population 40 --cohort-size 20 --rounds 2 --epsilon 30 --name tiny"
    " --against released --sampling fixed --dropouts 0 --colluders 0 --backend in-process"
)

PLAIN_NAME = "letters, digits and underscores, after the first also dashes and dots, at most 100 of all"


def on_terminal(line: str, columns: int, directory: Path, **environment: str) -> str:
    """Run a command on a terminal of so many columns, and return all that it writes there."""
    inside, outside = pty.openpty()
    termios.tcsetwinsize(outside, (40, columns))
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-c", ENTRY, *line.split()]
    with subprocess.Popen(
        command, stdin=outside, stdout=outside, stderr=outside, cwd=directory, env=own | environment
    ) as process:
        os.close(outside)
        written = b""
        try:
            while chunk := os.read(inside, 1 << 16):
                written += chunk
        except OSError:  # the other end is closed
            pass
    os.close(inside)
    assert process.returncode == 0, written
    return written.decode()


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: str) -> tuple[int, str, str]:
        return run_command(words, monkeypatch, capsys)

    return call


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_no_escapes_gets_none(tmp_path, environment):
    assert "\x1b" not in on_terminal("plan", 80, tmp_path, **environment)
    written = on_terminal(TINY, 80, tmp_path, **environment)
    assert "\x1b" not in written
    assert "round 2 of 2: accuracy" in written


def test_a_terminal_that_takes_escapes_gets_a_moving_bar_and_no_markup(tmp_path):
    written = on_terminal(TINY, 80, tmp_path, TERM="xterm-256color")
    assert "\x1b[" in written
    assert "━" in written
    (tmp_path / "runs" / "tiny").rename(tmp_path / "runs" / "[red]tiny")
    assert "runs/[red]tiny" in on_terminal("report runs/[red]tiny", 80, tmp_path, NO_COLOR="1")


@pytest.mark.parametrize("columns", [60, 80])
def test_the_plan_fits_the_terminal(tmp_path, columns):
    written = on_terminal("plan", columns, tmp_path, NO_COLOR="1", TERM="xterm")
    assert "colluding(192)" in written
    assert max(map(len, written.replace("\r", "").split("\n"))) <= columns


def test_a_file_gets_no_escapes_and_a_line_of_progress(run):
    status, out, err = run(*TINY.split())
    assert status == 0
    assert "\x1b" not in out + err
    assert "round 1 of 2: accuracy" in err


SUBCOMMANDS = (
    "audit mechanism",
    "audit training",
    "audit membership",
    "certify run",
    "certify verify",
    "client init",
    "client enrol",
    "client adopt",
    "client show",
    "client status",
    "deploy status",
    "data fetch",
    "data where",
    "ledger create",
    "ledger show",
    "ledger verify",
    "roster authority",
    "roster draws",
    "roster sign",
    "roster show",
)


@pytest.mark.parametrize("line", ["", *COMMANDS, *SUBCOMMANDS])
def test_every_help_fits_eighty_columns_and_says_all(run, line):
    if line.split()[:1] in (["client"], ["roster"]):
        pytest.importorskip("flwr")
    status, out, _ = run(*line.split(), "--help")
    assert status == 0
    assert max(map(len, out.split("\n"))) <= 80
    for text in out.partition("\n")[2].split("\n"):
        assert "[required]" not in text or "--" in text or not re.match(r"  [A-Z]+ ", text), text
        assert not text.endswith("..."), text


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("plan --epsilonn 1", "No such option '--epsilonn'. Did you mean '--epsilon'? See `d2pfed plan --help`."),
        ("roster draw", "No such command 'draw'. Did you mean 'draws'? See `d2pfed roster --help`."),
        ("plan more", "Got unexpected extra argument (more). See `d2pfed plan --help`."),
        *(
            (f"train --name {name}", f"a run's name must be {PLAIN_NAME}, got {name!r}")
            for name in ("", "..", "a/b")
        ),
        ("train --lost 2", "lost must be in [0, 1], got 2"),
        ("train --config t.toml", "t.toml: there is no option nonsense; --help lists them"),
        ("report nowhere", "there is no run directory nowhere; there are runs/one"),
        ("audit training nowhere", "there is no run directory nowhere; there are runs/one"),
        ("audit mechanism --confidence 2", "confidence must be in (0, 1), got 2.0"),
    ],
)
def test_a_mistake_is_one_line_with_what_would_do(run, tmp_path, words, complaint):
    if words.startswith("roster"):
        pytest.importorskip("flwr")
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "settings.json").touch()
    (tmp_path / "t.toml").write_text("nonsense = 1")
    assert run(*words.split(" ")) == (2, "", f"d2pfed: {complaint}\n")


def test_what_a_file_says_does_not_speak_to_the_terminal(run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text("{}")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"directory": "", "rounds": "\x1b]0;planted\x07"}))
    status, _, said = run("report", "run")
    assert (status, "got ?]0;planted?" in said, "\x1b" in said) == (2, True, False)


STARTS_AFRESH = """
import multiprocessing, typer
from d2pfed.cli import run
app = typer.Typer()

@app.command()
def command():
    multiprocessing.get_context("forkserver").Process(target=print).start()

run(app, "command")
"""


@pytest.mark.parametrize("is_safe", [True, False])
def test_workers_run_nothing_of_the_current_directory(is_safe, tmp_path):
    (tmp_path / "received").mkdir()
    (tmp_path / "received" / "selectors.py").write_text("open('planted', 'w').close()")
    (tmp_path / "command.py").write_text(STARTS_AFRESH)  # as an installed command, of another directory
    own = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment = own if is_safe else own | {"PYTHONSAFEPATH": ""}  # without the setting
    command = [sys.executable, str(tmp_path / "command.py")]
    subprocess.run(command, cwd=tmp_path / "received", env=environment, check=False, capture_output=True)
    assert (tmp_path / "received" / "planted").exists() != is_safe


def test_data_that_needs_no_files_says_so(run):
    assert run("data", "where", "digits") == (0, "digits needs no files.\n", "")
    assert run("data", "fetch", "digits")[1].startswith("Nothing is missing")


def test_the_shell_can_complete_commands_and_options(monkeypatch, tmp_path):
    def completed(words: str, place: int) -> list[str]:
        asked = {"_D2PFED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        ended = subprocess.run(
            [sys.executable, "-c", ENTRY], env=os.environ | asked, capture_output=True, text=True, check=False
        )
        return ended.stdout.split()

    assert completed("d2pfed tr", 1) == ["train"]
    assert completed("d2pfed plan --ep", 2) == ["--epsilon"]
