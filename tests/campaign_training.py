"""Long training runs, and the check that neither memory nor the time of a round grows with the rounds behind it.

As a program (`campaign_training.py memory 1000 DIRECTORY`) it prints one JSON object and fails if memory grew by 5 %
or more after the first tenth of the rounds.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.learning import LocalTraining, build_model, load_task
from d2pfed.plan import Target
from d2pfed.run import Job, Progress, Settings
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerStep

LARGEST_GROWTH = 0.05


@dataclass
class Watch:
    """Listens to a run: memory in use and processor seconds, at the end of each round."""

    memory: list[int] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)

    def __call__(self, _progress: Progress) -> bool:
        """Note both, and let the run go on."""
        self.memory.append(resident_bytes())
        self.clock.append(time.process_time())
        return True

    def growth(self) -> float:
        """Return by which part memory grew from the first tenth of the rounds, which warms up, to the last."""
        tenth = max(1, len(self.memory) // 10)
        return max(self.memory[-tenth:]) / max(self.memory[:tenth]) - 1

    def round_seconds(self) -> tuple[float, float]:
        """Return the median processor seconds of an early round, after the first tenth, and of a late one."""
        tenth = max(1, len(self.clock) // 10)
        seconds = [after - before for before, after in zip(self.clock, self.clock[1:], strict=False)]
        return statistics.median(seconds[tenth : 2 * tenth]), statistics.median(seconds[-tenth:])


def resident_bytes() -> int:
    """Return how much memory this process has now, not at its peak."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def job_of(rounds: int) -> Job:
    """Return a small run of this many rounds: logistic regression on 8 x 8 digits, 20 clients of 100 a round."""
    task = load_task("digits", population=100)
    model = build_model("logistic", task, seed=0)
    target = Target(
        dimension=model.dimension,
        population=100,
        cohort=20,
        rounds=rounds,
        epsilon=100.0,
        delta=1e-3,
        clip_norm=1.0,
    )
    settings = Settings(
        task="digits",
        data=task.description,
        model="logistic",
        target=target,
        local=LocalTraining(rate=0.5, epochs=1, batch_size=10),
        step=ServerStep(),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=None,
    )
    return Job.of(settings, task, model)


def run(rounds: int, directory: Path) -> Watch:
    """Carry out a whole run and return what was seen."""
    watch = Watch()
    summary = job_of(rounds).execute(directory / "run", directory / "run" / "ledger.sqlite", watch)
    if summary.rounds != rounds:
        raise SystemExit(f"{rounds} rounds were planned, the run ended after {summary.rounds}: {summary.stopped}")
    return watch


def main(campaign: str, size: int, directory: Path) -> int:
    """Run the campaign, print what it found, and return 1 if memory grew."""
    if campaign != "memory":
        raise SystemExit(f"the campaign must be memory, got {campaign}")
    watch = run(size, directory)
    early, late = watch.round_seconds()
    found = {
        "rounds": len(watch.memory),
        "first_mib": watch.memory[0] / 2**20,
        "last_mib": watch.memory[-1] / 2**20,
        "growth": watch.growth(),
        "early_round_processor_seconds": early,
        "late_round_processor_seconds": late,
    }
    print(json.dumps(found))
    return int(watch.growth() >= LARGEST_GROWTH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
