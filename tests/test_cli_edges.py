"""Edge values in every option of every command: one line that says rule and value, or success; never a traceback."""

import json
import math

import pytest

from d2pfed.errors import ConfigError
from support.commands import run_command

HUGE = "1" + "0" * 400
WHOLE = ("0", "-1", "1", HUGE, f"-{HUGE}", str(2**63), str(2**31), "", "x", "1.5", "nan")
REAL = ("0", "-1", "1e-320", "1e308", HUGE, "nan", "inf", "-inf", "", "x", "0x1p3", "0.5")
WORD = ("", "x", "é" * 300, "-", "../..")
FILE = ("", "nowhere", "folder", "text", "/dev/null", "x" * 300, "nowhere/deeper")

PLAN = (
    "plan --population 400 --cohort-size 20 --rounds 4 --dimension 30 --epsilon 20 --delta 1e-3 "
    "--against released --sampling fixed --dropouts 0 --colluders 0"
)
PLAN_OPTIONS = {
    "--epsilon": REAL,
    "--delta": REAL,
    "--against": (*WORD, "colluding()", f"colluding({HUGE})", "colluding(0)", "colluding(1)", "colluding(-1)"),
    "--rounds": WHOLE,
    "--population": WHOLE,
    "--cohort-size": WHOLE,
    "--dimension": WHOLE,
    "--mechanism": WORD,
    "--sampling": WORD,
    "--adjacency": WORD,
    "--dropouts": REAL,
    "--colluders": (*REAL, *WHOLE),
    "--max-participations": WHOLE,
    "--clip": REAL,
    "--bits": WHOLE,
    "--rotation": WORD,
}
TRAIN = (
    "train --task digits --model logistic --population 40 --cohort-size 10 --rounds 1 --epsilon 60 --delta 1e-2 "
    "--name n --against released --sampling fixed --dropouts 0 --colluders 0 --backend in-process"
)
TRAIN_OPTIONS = PLAN_OPTIONS | {
    "--task": WORD,
    "--model": WORD,
    "--spare": WHOLE,
    "--partition": (*WORD, "dirichlet:", "dirichlet:nan", "dirichlet:0", f"dirichlet:{HUGE}", "dirichlet:1e-320"),
    "--optimizer": WORD,
    "--lr": REAL,
    "--momentum": REAL,
    "--epochs": WHOLE,
    "--batch-size": WHOLE,
    "--server-lr": REAL,
    "--server-momentum": REAL,
    "--server-second-moment": REAL,
    "--server-lr-decay": REAL,
    "--server-averaging": REAL,
    "--lost": (*REAL, "1/0", f"1/{HUGE}", "0,0,0,0", ",,,", "1e-320,0,0,0"),
    "--fidelity": WORD,
    "--seed": WHOLE,
    "--data": FILE,
    "--name": (*FILE, "a/b", "."),
    "--ledger": FILE,
    "--backend": WORD,
}
ACCOUNT = "account --noise-multiplier 1 --population 400 --cohort-size 20 --rounds 4 --delta 1e-3"
ACCOUNT_OPTIONS = {
    "--noise-multiplier": REAL,
    "--sampling": WORD,
    "--population": WHOLE,
    "--cohort-size": WHOLE,
    "--rounds": WHOLE,
    "--delta": REAL,
    "--accountant": (*WORD, "wbk", "rdp", "pld", "wbk-mironov"),
    "--adjacency": WORD,
}
BINOMIAL = "account --accountant binomial --trials 3642525 --levels 601"
BINOMIAL_OPTIONS = {
    "--trials": WHOLE,
    "--levels": WHOLE,
    "--dimension": WHOLE,
    "--delta-per-round": REAL,
    "--delta": REAL,
    "--rounds": WHOLE,
}
CREATE = "ledger create made --epsilon 1 --delta 1e-3"
CREATE_OPTIONS = {
    "--epsilon": REAL,
    "--delta": REAL,
    "--against": WORD,
    "--max-participations": WHOLE,
    "--declare": FILE,
}


def cases():
    for line, options in (
        (PLAN, PLAN_OPTIONS),
        (TRAIN, TRAIN_OPTIONS),
        (ACCOUNT, ACCOUNT_OPTIONS),
        (BINOMIAL, BINOMIAL_OPTIONS),
        (CREATE, CREATE_OPTIONS),
    ):
        for option, values in options.items():
            yield line, option, tuple(dict.fromkeys(values))
    for command in (
        "ledger show",
        "ledger verify",
        "report",
        "ledger create --epsilon 1 --delta 0.1",
        "data where",
    ):
        yield command, None, FILE
    yield "data fetch", None, ("", "x")


RUN = ("--name", "--ledger", "--lost")  # options that show their edges only when a run begins


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("a text that is no ledger and no plan " * 10)
    return tmp_path


def arguments(line, option, value):
    """The line with the option set to the value; without an option the value is an argument."""
    words = line.split()
    if option in words:
        at = words.index(option)
        del words[at : at + 2]
    return [*words, value] if option is None else [*words, f"{option}={value}"]


def require_clean(words, status, out, err):
    if status == 0:
        if "--json" in words and out.startswith("{"):
            assert '"epsilon": null' not in out, words
            assert all(math.isfinite(x) for x in numbers(json.loads(out))), words
        return
    lines = [line for line in err.splitlines() if line.startswith("d2pfed: ")]
    assert status in (2, 3), (words, status)
    assert status == 3 or len(lines) == 1, (words, err[-500:])
    assert "Traceback" not in err + out, words


def numbers(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize(("line", "option", "values"), list(cases()), ids=lambda part: str(part)[:40])
def test_an_edge_value_is_one_line_or_success(place, monkeypatch, capsys, line, option, values):
    if line == TRAIN and option not in RUN:

        def planned(*_given, **_named):
            raise ConfigError("a plan is all that is wanted here")

        monkeypatch.setattr("d2pfed.api.fitting._execute", planned)
    for value in values:
        words = arguments(line, option, value)
        if line in (PLAN, ACCOUNT, BINOMIAL):
            words.append("--json")
        require_clean(words, *run_command(words, monkeypatch, capsys))
