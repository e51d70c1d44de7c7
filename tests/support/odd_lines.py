"""Good command lines of every command, the files that they name, and odd words to put in."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import typer
from typer.core import TyperGroup

from d2pfed.cli import app

Ended = tuple[int, str, str]

SMALL = "--population 40 --cohort-size 10 --rounds 1 --epsilon 60 --delta 1e-2 --against released --sampling fixed"
TRAIN = f"train --task digits --model logistic {SMALL} --dropouts 0 --colluders 0 --backend in-process"
# What the names in braces stand for is made by `prepare_files`.
LINES = (
    f"plan {SMALL} --dimension 30 --dropouts 0 --colluders 0 --json",
    "plan --unit record --population 3 --records 500 --dimension 30 --rounds 2 --epsilon 8 --against server",
    "account --noise-multiplier 1 --population 400 --cohort-size 20 --rounds 4 --delta 1e-3 --sampling fixed --json",
    "account --accountant binomial --trials 3642525 --levels 601 --dimension 30 --rounds 2",
    f"{TRAIN} --lr 0.1 --epochs 1 --batch-size 10 --name other --ledger shared.sqlite --json",
    f"{TRAIN} --config good.toml --lost 0.1 --partition iid --stop-patience 2 --optimizer sgd --fidelity sum",
    "train --task digits --model logistic --clear --population 20 --cohort-size 10 --rounds 1 --backend in-process",
    "report runs/run --json",
    "audit mechanism --trials 20 --releases 1 --fidelity sum --epsilon 4 --cohort-size 4 --confidence 0.9 --json",
    "audit training runs/run --canaries 8 --confidence 0.9 --workers 1 --json",
    "audit membership runs/run --records 50 --json",
    "ledger show runs/run --plot plot.svg",
    "ledger show shared.sqlite --json",
    "ledger verify runs/run --json",
    "ledger create made --epsilon 80 --delta 1e-2 --max-participations 2 --declare runs/run/plan.json",
    "certify run runs/run --key key --output out --json",
    "certify runs/run --key key",
    "certify verify runs/run/certificate.json --key {signer} --ledger runs/run/ledger.sqlite --json",
    "client init new 9 {authority} --anchor anchor --epsilon 3 --unit client",
    "client enrol client roster",
    "client adopt client --run name=runs/run/plan.json --why reason",
    "client adopt cut-client --carried nothing",
    "client show client --json",
    "client status client --metrics out.prom --json",
    "deploy status folder --run run --metrics out.prom --json",
    "roster authority another",
    "roster draws another --depth 4",
    "roster sign authority next {client} --draws {draws} --previous roster --days 3 --remove 5 --positions text",
    "roster show roster {authority} --json",
    "data fetch mnist-writers --data folder --json",
    "data where shakespeare --data folder --json",
)
STATUSES = {"certify": (0, 1, 2, 3), "train": (0, 2, 3), "audit": (0, 2, 4)}  # by command; of all others 0 and 2
STATUSES |= {"client": (0, 1, 2), "deploy": (0, 1, 2)}
HUGE = "1" + "0" * 400
WORDS = (
    *(
        "",
        " ",
        "-",
        "--",
        "--help",
        "--version",
        "--no-such-option",
        "--no-such-option=1",
        "-x",
        "-h",
        "--json",
        "x",
    ),
    *("0", "-1", "1", "2", "1.5", HUGE, f"-{HUGE}", str(2**63), str(2**31), "0x10", "1_0", "٣", "1e-320", "1e308"),
    *(
        "nan",
        "inf",
        "-inf",
        "0.5",
        "true",
        "None",
        "auto",
        "auto(0)",
        "colluding(3)",
        f"colluding({HUGE})",
        "server",
    ),
    *(
        "record",
        "none",
        "once",
        "all",
        "nothing",
        "fixed",
        "mlp",
        "digits",
        "shared",
        "skellam",
        "dirichlet:nan",
        "iid",
    ),
    *(
        "os:getcwd",
        "json:nothing",
        "nowhere:f",
        ":",
        "json:",
        "a:b:c",
        "os.path:join",
        "0,0,0,0",
        ",,,",
        "1/0",
        "a=b",
    ),
    *(
        "=",
        "1=",
        "9=00",
        "name=text",
        "name=",
        "4:00",
        "99:" + "0" * 64,
        "0" * 64,
        "zz" * 32,
        "é" * 300,
        "x" * 9000,
    ),
    *("\udc80", "a\nb", "\x1b[31m", "%s%n", "*", "~", "..", ".", "/", "../..", "a/b", "é", "🐍"),
    *(
        "nowhere",
        "nowhere/deeper",
        "folder",
        "text",
        "empty",
        "binary",
        "locked",
        "loop",
        "/dev/null",
        "/dev/full",
    ),
    *("cut.sqlite", "cut.json", "cut.toml", "good.toml", "odd.toml", "runs/run", "runs", "runs/run/plan.json"),
    *(
        "runs/run/ledger.sqlite",
        "runs/run/settings.json",
        "runs/cut",
        "shared.sqlite",
        "roster",
        "key",
        "authority",
    ),
    *(
        "client",
        "client/client.toml",
        "cut-client",
        "runs/run/certificate.json",
        "cut-certificate.json",
        "x" * 300,
    ),
)


def leaves(group: TyperGroup | None = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every command with its options."""
    group = group or typer.main.get_command(app)  # type: ignore[assignment]
    context = typer.Context(group)  # type: ignore[arg-type]
    for name in group.list_commands(context):  # type: ignore[union-attr]
        command = group.get_command(context, name)  # type: ignore[union-attr]
        if isinstance(command, TyperGroup):
            yield from leaves(command, (*path, name))
        elif command is not None:
            options = [each for one in command.params for each in one.opts if each.startswith("--")]
            yield " ".join((*path, name)), tuple(options)


@cache
def options() -> dict[str, tuple[str, ...]]:
    """The options of every command."""
    return dict(leaves())


def command_of(line: str) -> str:
    """The command of a good line."""
    return next((name for name in options() if f"{line} ".startswith(f"{name} ")), "certify run")


def prepare_files(run: Callable[[list[str]], Ended]) -> dict[str, str]:
    """Make in this directory what the lines name, and damaged copies; return what the names in braces stand for."""

    def good(line: str) -> str:
        status, out, err = run(line.split())
        if status:
            raise AssertionError(f"d2pfed {line}: {err}")
        return out.strip()

    for name, content in (("text", "a text " * 50), ("empty", ""), ("good.toml", "epsilon = 50.0\nbits = 16\n")):
        Path(name).write_text(content)
    Path("odd.toml").write_text("epsilon = 2000-01-01\nrounds = [1]\n")
    Path("binary").write_bytes(bytes(range(256)) * 20)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    good(f"{TRAIN} --name run --lr 0.1")
    good("ledger create shared.sqlite --epsilon 80 --delta 1e-2 --max-participations 3")
    made = good("certify runs/run --key key")
    signer = made.split("--key ")[-1].split()[0]
    authority = good("roster authority authority")
    draws = good("roster draws draws --depth 4")
    client = good(f"client init client 5 {authority} --anchor anchor-5")
    good(f"roster sign authority roster {client} {good(f'client init sixth 6 {authority} --anchor anchor-6')}")
    for source, target in (
        ("runs/run/ledger.sqlite", "cut.sqlite"),
        ("runs/run/plan.json", "cut.json"),
        ("good.toml", "cut.toml"),
        ("runs/run/certificate.json", "cut-certificate.json"),
    ):
        Path(target).write_bytes(Path(source).read_bytes()[:-15])
    for source, target in (("runs/run", "runs/cut"), ("client", "cut-client")):
        Path(target).mkdir()
        for file in Path(source).iterdir():
            if file.is_file():
                (Path(target) / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    Path("locked").write_text("nobody may read this")
    os.chmod("locked", 0)  # noqa: PTH101 - beside the others
    return {"signer": signer, "authority": authority, "draws": draws, "client": client}
