"""Seconds of a round over NVFlare: private, its own FedAvg in the clear and encrypted; Flower's warm nodes; many silos.

In an environment that has NVFlare and, for the encrypted rounds, tenseal: python -m benchmarks.nvflare --out FILE

Servers and sites are processes that talk TLS over loopback. A round is what lies between the starts, or the ends, of
two rounds; the first one, in which everything is loaded, does not count. The ways take turns, `repeats` times, so that
what else the machine does meets all of them; its load is recorded.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.deployment import NAMES, Case, Executor, Way, measure
from benchmarks.record import surroundings, write

_ROOT = Path(__file__).resolve().parent.parent
_HERE = _ROOT / "benchmarks" / "nvflare_app"
_LONG_RUN = 500  # rounds, of which fewer are measured
_PATIENCE = 1800.0  # seconds
_JOB = """
from common import Net
{imports}
recipe = {recipe}(name="{name}", model=Net(), min_clients={sites}, num_rounds={rounds}, train_script="{script}"{more})
{change}
recipe.export("{place}")
"""
_OURS = "from d2pfed.nvflare.recipe import PrivateFedAvgRecipe"
_THEIRS = "from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe"
_ENCRYPTED = "from nvflare.app_opt.pt.recipes.fedavg_he import FedAvgRecipeWithHE"
# As often as a private job has sites ask for tasks: NVFlare's own 2 and 0.5 seconds would be most of a round.
_OFTEN = """recipe.add_server_config({"server": {"task_request_interval": 0.1}})
recipe.add_client_config({"default_task_fetch_interval": 0.1})"""
_ENDED = "Server app stopped"
_STARTED = re.compile(r"Round \d+ started")


@dataclass(frozen=True, slots=True)
class Job:
    """A way to train over NVFlare."""

    what: str
    imports: str
    script: str = "script.py"
    privacy: Mapping[str, object] | None = None
    change: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """One turn of a way: seconds of each round that counts, and the load of a minute, before and after."""

    what: str
    sites: int
    seconds: list[float]
    loads: tuple[float, float]


def _records(sites: int) -> dict[str, object]:
    return {
        "unit": "record", "epsilon": 3.0, "clip": 1.0, "dropouts": 0.0, "colluders": 0.1, "batch_rate": 0.1,
        "records": 64 * sites,
    }  # fmt: skip


def jobs(sites: int) -> tuple[Job, ...]:
    """Return what NVFlare is measured with: its own recipes, and the private ones."""
    pairs = {"epsilon": 1000.0, "clip": 1.0, "dropouts": 0.0, "colluders": 0.1}
    encrypted = (Job("NVFlare, FedAvg, HE (CKKS)", _ENCRYPTED, change=_OFTEN),) if find_spec("tenseal") else ()
    return (
        Job("NVFlare, FedAvg", _THEIRS, change=_OFTEN),
        *encrypted,
        Job("NVFlare, private, keys per round", _OURS, privacy=pairs),
        Job("NVFlare, private, records, standing keys", _OURS, "silo.py", _records(sites)),
        Job("NVFlare, FedAvg, asking every 2 s as it comes", _THEIRS),
    )


def run(job: Job, network: Any, name: str, sites: int, rounds: int) -> list[float]:  # noqa: ANN401 - a test's
    """Run a job in a network and return what its rounds took."""
    place = network.directory / "jobs"
    more = "" if job.privacy is None else f", privacy={dict(job.privacy)}, deadlines={{'poll': 0.1}}"
    text = _JOB.format(
        imports=job.imports, recipe=job.imports.split()[-1], name=name, sites=sites, rounds=rounds,
        script=job.script, more=more, change=job.change, place=place,
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", text], cwd=_HERE, check=True, capture_output=True)  # noqa: S603 - ours
    printed = len(network.log("server"))
    number = network.admin("submit", str(place / name))
    records = network.own("server") / name / "metrics.jsonl"
    ticks, until = list[float](), time.monotonic() + _PATIENCE
    while len(ticks) < rounds:
        time.sleep(0.03)
        log = network.log("server")[printed:]
        has_ended = _ENDED in log or time.monotonic() > until
        if job.privacy is None:
            done = len(_STARTED.findall(log))
        else:
            done = len(records.read_text().splitlines()) if records.exists() else 0
        if has_ended and done < rounds:
            raise SystemExit(f"{job.what}: {done} rounds: {log[-3000:]}")
        ticks += [time.monotonic()] * (done - len(ticks))
    while not network.admin("status", number).startswith("FINISHED"):
        time.sleep(1)
    return [after - before for before, after in pairwise(ticks)][1 if job.privacy is None else 0 :]


def bench(sites: int, rounds: int, repeats: int, silos: int, silo_rounds: int) -> Iterator[Measured]:
    """Yield a row for each turn of each way; none of `sites` or of `silos` leaves those out."""
    if silos:
        job = Job("NVFlare, private, records, many silos", _OURS, "silo.py", _records(silos))
        with TemporaryDirectory() as directory, _network(Path(directory), silos) as network:
            network.bring_up(*network.names)
            yield _timed(job.what, silos, lambda: run(job, network, "silos", silos, silo_rounds))
    if sites:
        yield from _take_turns(sites, rounds, repeats)


def _seconds(case: Case) -> list[float]:
    return [measure(case, 900.0).seconds or 0.0]


def _take_turns(sites: int, rounds: int, repeats: int) -> Iterator[Measured]:
    with TemporaryDirectory() as directory, _network(Path(directory), sites) as network:
        network.bring_up(*network.names)
        for turn in range(repeats):
            for place, job in enumerate(jobs(sites)):
                train = partial(run, job, network, f"timed-{turn}-{place}", sites, rounds)
                yield _timed(job.what, sites, train)
            for way in (Way.PLAIN, Way.PRIVATE, Way.STANDING):
                case = Case(way, Executor.WARM, sites, rounds)
                yield _timed(f"Flower, {NAMES[way]}", sites, partial(_seconds, case))


def _timed(what: str, sites: int, train: Callable[[], list[float]]) -> Measured:
    before = os.getloadavg()[0]
    return Measured(what, sites, train(), (before, os.getloadavg()[0]))


def _network(directory: Path, sites: int) -> Any:  # noqa: ANN401 - a test's
    tests = str(_ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    support = import_module("support.nvflare_network")
    return support.Network(directory / "network", sites, is_encrypted=find_spec("tenseal") is not None)


def table(rows: Sequence[Measured]) -> str:
    """Return the median of each way for people."""
    lines = []
    for what in dict.fromkeys(row.what for row in rows):
        seconds = [each for row in rows if row.what == what for each in row.seconds]
        sites, loads = (
            next(row.sites for row in rows if row.what == what),
            [row.loads for row in rows if row.what == what],
        )
        low, high = min(map(min, loads)), max(map(max, loads))
        lines.append(
            f"{statistics.median(seconds):6.2f} s  {what}, {sites} sites, at a load of {low:.0f} to {high:.0f}"
        )
        if "silos" in what:
            lines.append(f"{statistics.mean(seconds) * _LONG_RUN / 60:6.1f} minutes for {_LONG_RUN} rounds")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--silo-rounds", type=int, default=51)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    about, rows = surroundings(), list[Measured]()
    for row in bench(chosen.sites, chosen.rounds, chosen.repeats, chosen.silos, chosen.silo_rounds):
        rows.append(row)
        if chosen.out is not None:
            write(chosen.out, about, {"nvflare": [asdict(row) for row in rows]})
    print(table(rows))


if __name__ == "__main__":
    main()
