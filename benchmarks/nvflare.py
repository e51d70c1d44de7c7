"""Seconds of a round over NVFlare: private and with its own FedAvg, beside Flower's warm nodes; and many silos.

In an environment that has NVFlare (scripts/nvflare makes one): python -m benchmarks.nvflare
NVFlare's simulator runs each site as a process. The first round, in which everything is loaded, does not count.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.deployment import Case, Executor, Way, measure

_HERE = Path(__file__).resolve().parent / "nvflare_app"
_PRIVATE = {"epsilon": 1000.0, "clip": 1.0, "dropouts": 0.0, "colluders": 0.1}
_JOB = """
from common import Net
from nvflare.recipe import SimEnv
{imports}
recipe = {recipe}(name="timed", model=Net(), min_clients={sites}, num_rounds={rounds}, train_script="{script}", {more})
recipe.execute(SimEnv(num_clients={sites}, workspace_root="{place}"))
"""
_OURS = "from d2pfed.nvflare.recipe import PrivateFedAvgRecipe"
_THEIRS = "from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe"
_STARTED = re.compile(r"^(\S+ \S+) .*Round \d+ started", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Measured:
    """Median and mean seconds of a round, and how many rounds count."""

    what: str
    sites: int
    rounds: int
    seconds: float
    mean_seconds: float


def _row(what: str, sites: int, ticks: Sequence[float]) -> Measured:
    lengths = [after - before for before, after in pairwise(ticks)]
    return Measured(what, sites, len(lengths), statistics.median(lengths), statistics.mean(lengths))


def simulate(what: str, script: str, sites: int, rounds: int, privacy: dict[str, object] | None) -> Measured:
    """Run a job in NVFlare's simulator and return what its rounds took, by when each one's record was written."""
    more = "" if privacy is None else f"privacy={privacy}, deadlines={{'poll': 0.1}}"
    imports, recipe = (_THEIRS, "FedAvgRecipe") if privacy is None else (_OURS, "PrivateFedAvgRecipe")
    with TemporaryDirectory() as directory:
        place = Path(directory)
        job = _JOB.format(
            imports=imports, recipe=recipe, sites=sites, rounds=rounds, script=script, more=more, place=place
        )
        environment = {name: value for name, value in os.environ.items() if name != "D2PFED_SIMULATION"}
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own job
                [sys.executable, "-c", job], cwd=_HERE, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            ticks, records = list[float](), place / "timed-d2pfed" / "server" / "timed" / "metrics.jsonl"
            while process.poll() is None:
                time.sleep(0.02)
                done = len(records.read_text().splitlines()) if records.exists() else 0
                ticks += [time.monotonic()] * (done - len(ticks))
        text = (place / "log").read_text()
        if process.returncode:
            raise SystemExit(f"{what} has failed: {text[-2000:]}")
        if privacy is None:
            begun = [datetime.fromisoformat(each.replace(",", ".")) for each in _STARTED.findall(text)]
            ticks = [each.timestamp() for each in begun[1:]]
        return _row(what, sites, ticks)


def bench(sites: int, rounds: int, silos: int, silo_rounds: int) -> Iterator[Measured]:
    """Yield a row for each way; none of `sites` or of `silos` leaves those out."""
    records = {"unit": "record", "epsilon": 3.0, "clip": 1.0, "dropouts": 0.0, "colluders": 0.1, "batch_rate": 0.1}
    if sites:
        yield simulate("NVFlare, FedAvg", "script.py", sites, rounds, None)
        yield simulate("NVFlare, private, pairwise", "script.py", sites, rounds, dict(_PRIVATE))
        few = {**records, "records": 64 * sites}
        yield simulate("NVFlare, private, records, standing keys", "silo.py", sites, rounds, few)
        for way in (Way.PLAIN, Way.PRIVATE, Way.STANDING):
            found = measure(Case(way, Executor.WARM, sites, rounds), 200.0)
            if found.seconds is not None and found.mean_seconds is not None:
                yield Measured(f"Flower, {found.what}", sites, found.rounds, found.seconds, found.mean_seconds)
    if silos:
        many = {**records, "records": 64 * silos}
        yield simulate("NVFlare, private, records, many silos", "silo.py", silos, silo_rounds, many)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--silos", type=int, default=20)
    parser.add_argument("--silo-rounds", type=int, default=51)
    chosen = parser.parse_args()
    for row in bench(chosen.sites, chosen.rounds, chosen.silos, chosen.silo_rounds):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
