"""Long training runs: neither memory nor the time of a round grows with the rounds behind it; kills cost a round each.

As a program (`campaign_training.py memory 1000 DIRECTORY`) it prints one JSON object and fails if memory grew by 5 %
or more after the first tenth of the rounds. `kills 20` kills `d2pfed train` at so many random moments, with more
attempts to spare than kills: it must come to its last round. `exhausted 3` kills it more often than its 3 spare
attempts allow: it must end with its own exit status, and the test data closed.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.api import Job
from d2pfed.cli.train import EXHAUSTED
from d2pfed.learning import LocalTraining, build_model, load_task
from d2pfed.ledger import verify
from d2pfed.numerics.randomness import Entropy, Stream
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.runs import RoundRecord
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerOptimizer
from reproduction.job import Settings, execute, task_job

LARGEST_GROWTH = 0.05


@dataclass
class Watch:
    """Listens to a run: memory in use and processor seconds, at the end of each round."""

    memory: list[int] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)

    def __call__(self, _record: RoundRecord) -> bool:
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
    target = PrivacyTarget(
        dimension=model.dimension,
        population=100,
        cohort_size=20,
        rounds=rounds,
        epsilon=100.0,
        delta=1e-3,
        clip=1.0,
    )
    settings = Settings(
        task="digits",
        data=task.description,
        model="logistic",
        target=target,
        local=LocalTraining(lr=0.5, epochs=1, batch_size=10),
        server=ServerOptimizer(),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=None,
    )
    return task_job(settings, task, model, calibrate(settings.target))


def run(rounds: int, directory: Path) -> Watch:
    """Carry out a whole run and return what was seen."""
    watch = Watch()
    summary = execute(job_of(rounds), directory / "run", None, watch)
    if summary.rounds != rounds:
        raise SystemExit(f"{rounds} rounds were planned, the run ended after {summary.rounds}: {summary.stopped}")
    return watch


def start(rounds: int, spare: int, directory: Path) -> subprocess.Popen[bytes]:
    """Start the command, or carry on the run that it began."""
    options = (
        f"train --task digits --model logistic --population 100 --cohort-size 20 --rounds {rounds} --epsilon 100 "
        f"--delta 1e-3 --spare {spare} --name killed --against released --sampling fixed --dropouts 0 --colluders 0"
    )
    program = "from d2pfed.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *options.split()],
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def killed(process: subprocess.Popen[bytes], directory: Path, stream: Stream) -> bool:
    """Kill the command at a random moment of its next rounds; return False if it came to an end before."""
    ledger = directory / "runs" / "killed" / "ledger.sqlite-wal"
    seen, changes, wanted = -1, 0, 2 + stream.below(8)  # some writes of its ledger, then a part of a round
    while changes < wanted:
        if process.poll() is not None:
            return False
        now = ledger.stat().st_mtime_ns if ledger.exists() else -1
        changes += now != seen
        seen = now
        time.sleep(0.001)
    time.sleep(stream.below(1000) / 20_000)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def outcome(process: subprocess.Popen[bytes], directory: Path) -> dict[str, object]:
    """Return what a command that was left alone came to."""
    status = process.wait()
    run = directory / "runs" / "killed"
    summary = json.loads((run / "summary.json").read_text())
    found = verify(run / "ledger.sqlite")
    return {
        "status": status,
        "rounds": summary["rounds"],
        "charged": found.charged["killed"],
        "max_attempts": summary["max_attempts"],
        "unfinished": found.unfinished,
        "epsilon": found.spent,
        "test_metrics": summary["test_metrics"],
    }


def kills(count: int, directory: Path, seed: str) -> dict[str, object]:
    """Kill a run so many times, with as many attempts to spare and a quarter more, and let it finish."""
    stream = Entropy.replay(seed.encode()).stream()
    rounds, spare = 4 * count, count + -(-count // 4)
    done = sum(killed(start(rounds, spare, directory), directory, stream) for _ in range(count))
    found = {"kills": done} | outcome(start(rounds, spare, directory), directory)
    good = (found["status"], found["rounds"], done) == (0, rounds, count) and found["test_metrics"] is not None
    result = f"{done:,} kills of `d2pfed train` in its {rounds:,} rounds; left alone it ended with {_told(found)}"
    return {"campaign": "kills of whole runs", "result": result} | found | {"failed": int(not good)}


def exhausted(spare: int, directory: Path, seed: str) -> dict[str, object]:
    """Kill a run until its attempts are used up, and see how it ends."""
    stream = Entropy.replay(seed.encode()).stream()
    done = 0
    while killed(start(40, spare, directory), directory, stream):
        done += 1
    found = {"kills": done} | outcome(start(40, spare, directory), directory)
    good = (found["status"], found["test_metrics"]) == (EXHAUSTED, None) and done > spare
    result = (
        f"{done} kills of `d2pfed train` with {spare} attempts to spare; left alone it ended with {_told(found)}"
    )
    failed = int(not good or found["charged"] != found["max_attempts"])
    return {"campaign": "a run whose attempts are used up", "result": result} | found | {"failed": failed}


def _told(found: dict[str, object]) -> str:
    return (
        f"status {found['status']} after round {found['rounds']}, {found['charged']} of {found['max_attempts']} "
        f"attempts charged, {found['unfinished']} of them unfinished, its ledger whole"
    )


def memory(size: int, directory: Path) -> dict[str, object]:
    """Watch a run of so many rounds."""
    watch = run(size, directory)
    early, late = watch.round_seconds()
    first, last = watch.memory[0] / 2**20, watch.memory[-1] / 2**20
    return {
        "campaign": "memory of a long run",
        "result": f"{len(watch.memory):,} rounds: {first:.1f} MiB after the first, {last:.1f} after the last; "
        f"{1000 * early:.1f} ms of processor time for an early round, {1000 * late:.1f} for a late one",
        "rounds": len(watch.memory),
        "growth": watch.growth(),
        "early_round_processor_seconds": early,
        "late_round_processor_seconds": late,
        "failed": int(watch.growth() >= LARGEST_GROWTH),
    }


def main(campaign: str, size: int, directory: Path, seed: str = "training") -> int:
    """Run the campaign, print what it found, and return 1 if it failed."""
    campaigns = {
        "memory": lambda: memory(size, directory),
        "kills": lambda: kills(size, directory, seed),
        "exhausted": lambda: exhausted(size, directory, seed),
    }
    if campaign not in campaigns:
        raise SystemExit(f"the campaign must be {', '.join(campaigns)}, got {campaign}")
    found = campaigns[campaign]()
    print(json.dumps(found))
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
