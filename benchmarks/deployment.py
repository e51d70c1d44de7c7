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
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any  # the federation on one machine is an example, and has no types here

from d2pfed.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = 1210
GOAL = 3.0  # a private round over one in the clear with its evaluation, both on warm nodes

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
serverapp = "deployed.{way}_server:app"
clientapp = "deployed.{way}_client:app"
[tool.flwr.app.config]
clients = {clients}
num-server-rounds = {rounds}
times = "{times}"
d2pfed-directory = "{server}"
"""


class Way(StrEnum):
    """How a round goes."""

    PRIVATE = "private"
    PLAIN = "plain"
    SECAGG = "secagg"


class Executor(StrEnum):
    """Who runs a client's app."""

    WARM = "warm"
    STOCK = "stock"


NAMES = {
    Way.PRIVATE: "private round",
    Way.PLAIN: "FedAvg with evaluation",
    Way.SECAGG: "Flower's SecAgg+",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRow:
    """One way by one executor: median seconds of a round; of a private one, of each exchange too."""

    what: str
    executor: str
    clients: int
    rounds: int  # that count
    seconds: float | None
    exchanges: dict[str, float] = field(default_factory=dict)
    ratio: float | None = None  # over FedAvg with evaluation by the same executor
    goal: float | None = None
    error: str = ""

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None if there is none or nothing was measured."""
        return None if self.goal is None or self.ratio is None else self.ratio <= self.goal


def bench_deployment(
    clients: int, rounds: int, executors: Sequence[Executor], patience: float = 1800.0
) -> Iterator[DeploymentRow]:
    """Yield a row for each way and executor."""
    for executor in executors:
        plain: float | None = None
        for way in (Way.PLAIN, Way.PRIVATE, Way.SECAGG):
            try:
                seconds, exchanges = measure(way, executor, clients, rounds, patience)
                error = ""
            except (ConfigError, RuntimeError, OSError) as failure:
                seconds, exchanges, error = None, {}, str(failure).strip().splitlines()[-1][:300]
            plain = seconds if way is Way.PLAIN else plain
            ratio = None if seconds is None or plain is None or way is Way.PLAIN else seconds / plain
            yield DeploymentRow(
                what=NAMES[way],
                executor=executor.value,
                clients=clients,
                rounds=rounds - 1,
                seconds=seconds,
                exchanges=exchanges,
                ratio=ratio,
                goal=GOAL if way is Way.PRIVATE and executor is Executor.WARM else None,
                error=error,
            )


def measure(
    way: Way, executor: Executor, clients: int, rounds: int, patience: float
) -> tuple[float, dict[str, float]]:
    """Return the median seconds of a round, and of its exchanges where they are known."""
    if rounds < 2:
        raise ConfigError(f"the first round does not count, so there must be at least 2, got {rounds}")
    with TemporaryDirectory() as directory:
        app, times = Path(directory) / "app", Path(directory) / "times"
        shutil.copytree(_APP, app, ignore=shutil.ignore_patterns("__pycache__"))
        with _federation(
            Path(directory) / "federation", clients, app if executor is Executor.WARM else None
        ) as found:
            settings = {
                "way": way.value,
                "clients": clients,
                "rounds": rounds,
                "times": times,
                "server": found.server,
            }
            (app / "pyproject.toml").write_text(_SETTINGS.format(**settings))
            found.start_superlink()
            for client in range(clients):
                found.register(client)
                found.start_supernode(client)
            found.run(app, {})
            ticks = _wait(times, rounds + 1, patience, found)
        lengths = [after - before for before, after in pairwise(ticks[1:])]
        return statistics.median(lengths), _exchanges(Path(directory) / "federation" / "server" / "run")


def _federation(directory: Path, clients: int, app: Path | None) -> Any:  # noqa: ANN401 - an example's class
    example = str(ROOT / "examples" / "flower")
    if example not in sys.path:
        sys.path.insert(0, example)
    environment = {"PYTHONPATH": str(ROOT / "src")}
    return import_module("loopback").Federation(directory, clients, environment=environment, app=app)


def _wait(times: Path, ticks: int, patience: float, federation: Any) -> list[float]:  # noqa: ANN401
    """Return the server's ticks, once all of them are there."""
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
            raise ConfigError(f"{done} were done in {patience:g} s")
        time.sleep(0.2)


def _exchanges(run: Path) -> dict[str, float]:
    """Return the median seconds of each exchange of a private run, without its first round; none of another."""
    file = run / "metrics.jsonl"
    lines: list[Mapping[str, Any]] = [
        json.loads(line) for line in (file.read_text() if file.exists() else "").splitlines()
    ]
    seconds: dict[str, list[float]] = {}
    for line in lines[1:]:
        for each in line["exchanges"]:
            seconds.setdefault(str(each["name"]), []).append(float(each["seconds"]))
    return {name: statistics.median(measured) for name, measured in seconds.items()}
