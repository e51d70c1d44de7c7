"""Rounds of a real federation on this machine: private, averaged in the clear, and with Flower's SecAgg+.

SuperLink, SuperNodes and apps are processes that talk TLS over loopback and authenticate. A round is what lies between
two ticks of the server's clock; the first one, in which everything is loaded, does not count.
"""

import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any  # the federation on one machine is an example, and has no types here

from d2pfed.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = 1210

_LEAST_TICKS = 3  # before the first round, after it, and after one that counts
_LONG_RUN = 500  # rounds, of which fewer are measured
_STOCK_ROUNDS = 3  # they take about a minute each
_MEMORY = "/dev/shm"  # noqa: S108 - where silos keep standing keys: not on a disk
_APP = ROOT / "benchmarks" / "deployment_app"
_SETTINGS = """[project]
name = "deployed"
version = "1.0.0"
description = "A federation whose rounds are timed."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "d2pfed"
[tool.flwr.app.components]
serverapp = "deployed.{app}_server:app"
clientapp = "deployed.{app}_client:app"
[tool.flwr.app.config]
clients = {clients}
num-server-rounds = {rounds}
times = "{times}"
keys = "{keys}"
d2pfed-directory = "{directory}"
"""


class Way(StrEnum):
    """How a round goes."""

    PLAIN = "plain"
    PRIVATE = "private"
    STANDING = "standing"
    SECAGG = "secagg"


class Executor(StrEnum):
    """Who runs a client's app."""

    WARM = "warm"
    STOCK = "stock"


NAMES = {
    Way.PLAIN: "FedAvg with evaluation",
    Way.PRIVATE: "private round",
    Way.STANDING: "private round, standing keys",
    Way.SECAGG: "Flower's SecAgg+",
}


_APPS = {Way.STANDING: Way.PRIVATE.value}  # the same app, told to keep its keys


@dataclass(frozen=True, slots=True)
class Case:
    """A federation that is measured: how, by whom, how many clients, and how many rounds, of which one warms up."""

    way: Way
    executor: Executor
    clients: int
    rounds: int

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ConfigError(f"the first round does not count, so there must be at least 2, got {self.rounds}")


def cases(clients: int, rounds: int, silos: int, silo_rounds: int) -> tuple[Case, ...]:
    """Return what is measured: each way by warm nodes, Flower's SecAgg+ by its own executor, and many silos."""
    warm = tuple(Case(way, Executor.WARM, clients, rounds) for way in Way)
    stock = Case(Way.SECAGG, Executor.STOCK, clients, min(rounds, _STOCK_ROUNDS))
    return (*warm, stock, Case(Way.STANDING, Executor.WARM, silos, silo_rounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """One federation: median and mean seconds of a round, and the median seconds of each of its stages."""

    what: str
    executor: str
    clients: int
    rounds: int  # that count
    seconds: float | None
    mean_seconds: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    set_up_seconds: float | None = None  # from the start of the SuperLink to the end of the first round
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentGoal:
    """A goal: what is compared, what was measured, and what it may be at most."""

    what: str
    value: float | None
    limit: float

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None if nothing was measured."""
        return None if self.value is None else self.value <= self.limit


def bench_deployment(measured: Sequence[Case], patience: float = 600.0) -> Iterator[DeploymentRow]:
    """Yield a row for each case; one that fails has its error in the place of seconds."""
    for case in measured:
        try:
            yield measure(case, patience)
        except (ConfigError, RuntimeError, OSError, TimeoutExpired) as failure:
            yield _row(case, None, None, error=str(failure).strip().splitlines()[-1][:300])


def in_words(stages: Mapping[str, float]) -> str:
    """Return the seconds of each stage, as people read them."""
    return ", ".join(f"{name.lower().replace('_', ' ')} {seconds:.2f}" for name, seconds in stages.items())


def goals(rows: Sequence[DeploymentRow]) -> tuple[DeploymentGoal, ...]:
    """Hold what was measured against the goals."""
    few = {(row.what, row.executor): row.seconds for row in rows if row.what != NAMES[Way.STANDING]}
    standing = sorted((row for row in rows if row.what == NAMES[Way.STANDING]), key=lambda row: row.clients)
    keys = standing[0].seconds if standing else None
    silos = standing[-1] if len(standing) > 1 else None
    private = few.get((NAMES[Way.PRIVATE], Executor.WARM))
    plain = few.get((NAMES[Way.PLAIN], Executor.WARM))
    ratios = [
        DeploymentGoal(what="private round over FedAvg with evaluation", value=_ratio(private, plain), limit=3.0),
        DeploymentGoal(what="the same with standing keys", value=_ratio(keys, plain), limit=1.5),
    ]
    for executor in Executor:
        peer = few.get((NAMES[Way.SECAGG], executor))
        ratios += [
            DeploymentGoal(what=f"private round over SecAgg+, {executor}", value=_ratio(private, peer), limit=1.0),
            DeploymentGoal(
                what=f"with standing keys over SecAgg+, {executor}", value=_ratio(keys, peer), limit=1.0
            ),
        ]
    minutes = None if silos is None or silos.mean_seconds is None else silos.mean_seconds * _LONG_RUN / 60
    many = "" if silos is None else f", {silos.clients} silos over {silos.rounds} rounds"
    long_run = DeploymentGoal(what=f"minutes for {_LONG_RUN} rounds{many}", value=minutes, limit=45.0)
    return (*ratios, long_run)


def measure(case: Case, patience: float) -> DeploymentRow:
    """Start a federation, run it, and return what its rounds took."""
    with TemporaryDirectory() as directory, TemporaryDirectory(dir=_MEMORY) as memory:
        app, times = Path(directory) / "app", Path(directory) / "times"
        shutil.copytree(_APP, app, ignore=shutil.ignore_patterns("__pycache__"))
        started = time.monotonic()
        warm = app if case.executor is Executor.WARM else None
        with _federation(Path(directory) / "federation", case.clients, warm, memory) as found:
            settings = {
                "app": _APPS.get(case.way, case.way.value),
                "clients": case.clients,
                "rounds": case.rounds,
                "times": times,
                "keys": "standing" if case.way is Way.STANDING else "attempt",
                "directory": found.server,
            }
            (app / "pyproject.toml").write_text(_SETTINGS.format(**settings))
            found.start_superlink()
            with ThreadPoolExecutor(max_workers=2) as pool:
                list(pool.map(found.register, range(case.clients)))
            for client in range(case.clients):
                found.start_supernode(client)
            found.run(app, {})
            ticks = _wait(times, case.rounds + 1, patience, found)
        stages = _stages(Path(directory) / "federation" / "server" / "run", times.with_suffix(".stages"))
        return _row(case, ticks, stages, set_up=ticks[1] - started)


def _row(
    case: Case,
    ticks: Sequence[float] | None,
    stages: Mapping[str, float] | None,
    set_up: float = 0.0,
    error: str = "",
) -> DeploymentRow:
    lengths = [] if ticks is None else [after - before for before, after in pairwise(ticks[1:])]
    known = dict(stages or {})
    if known and lengths:
        known["rest"] = statistics.median(lengths) - sum(known.values())
    return DeploymentRow(
        what=NAMES[case.way],
        executor=case.executor.value,
        clients=case.clients,
        rounds=len(lengths),
        seconds=statistics.median(lengths) if lengths else None,
        mean_seconds=statistics.mean(lengths) if lengths else None,
        stages=known,
        set_up_seconds=set_up if lengths else None,
        error=error,
    )


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


def _federation(directory: Path, clients: int, app: Path | None, memory: str) -> Any:  # noqa: ANN401 - an example's
    example = str(ROOT / "examples" / "flower")
    if example not in sys.path:
        sys.path.insert(0, example)
    environment = {"PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": memory}
    return import_module("loopback").Federation(directory, clients, environment=environment, app=app)


def _wait(times: Path, ticks: int, patience: float, federation: Any) -> list[float]:  # noqa: ANN401
    """Return the server's ticks, once all of them are there; those that are there in time, if they make a round."""
    until = time.monotonic() + patience
    while True:
        has_ended = "Finished task" in federation.log("superlink")  # asked first: its last tick is there then
        found = times.read_text().splitlines() if times.exists() else []
        if len(found) >= ticks:
            return [float(tick) for tick in found[:ticks]]
        done = f"{max(0, len(found) - 1)} of {ticks - 1} rounds"
        if has_ended:
            raise ConfigError(f"the app ended after {done}")
        if time.monotonic() > until:
            if len(found) >= _LEAST_TICKS:
                return [float(tick) for tick in found]
            raise ConfigError(f"{done} were done in {patience:g} s")
        time.sleep(0.2)


def _stages(run: Path, stages: Path) -> dict[str, float]:
    """Return the median seconds of each stage without the first round: as a private run says, else as Flower's grid."""
    metrics, seconds = run / "metrics.jsonl", dict[str, list[float]]()
    for line in _lines(metrics):
        for each in json.loads(line)["exchanges"]:
            seconds.setdefault(str(each["name"]), []).append(float(each["seconds"]))
    for line in _lines(stages):
        name, _, measured = line.rpartition(" ")
        seconds.setdefault(name, []).append(float(measured))
    return {name: statistics.median(measured[1:]) for name, measured in seconds.items() if len(measured) > 1}


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
