"""The table: every system on every split, and paired differences with intervals. Finished rows are not run again."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.consortium.data import SILOS, TASKS, split
from benchmarks.consortium.systems import COLLUDERS, SYSTEMS, WITHOUT_EPSILON, Setting, own_noise

EPSILONS = (1.0, 3.0, 8.0)
SPLITS = 10
FIRST_SPLIT = 100  # smaller ones were used to choose learning rates
OURS, EQUAL_NOISE = "d2pfed, 20 silos", "DP-SGD on pooled data, our noise"


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One system on one split; epsilon is 0 where there is none."""

    task: str
    epsilon: float
    system: str
    split: int
    accuracy: float
    auroc: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A system over all splits, in points: its mean, and ours less its own with a 95 % interval (paired t)."""

    task: str
    epsilon: float
    system: str
    splits: int
    accuracy: float
    auroc: float
    accuracy_difference: tuple[float, float, float]
    auroc_difference: tuple[float, float, float]


def rows(path: Path, tasks: Sequence[str], splits: int, tell: Callable[[str], None]) -> list[ScoreRow]:
    """Run what the file does not hold yet, and return all of it."""
    known = list(_read(path))
    done = {(row.task, row.epsilon, row.system, row.split) for row in known}
    for task in tasks:
        records = TASKS[task]()
        for number in range(FIRST_SPLIT, FIRST_SPLIT + splits):
            own = split(records, number)
            for system, epsilon in _wanted():
                if (task, epsilon, system, number) in done:
                    continue
                with tempfile.TemporaryDirectory() as directory:
                    score = SYSTEMS[system](Setting(own, epsilon or 1.0, number, Path(directory)))
                row = ScoreRow(task, epsilon, system, number, score.accuracy, score.auroc)
                with path.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                known.append(row)
                tell(f"{task}, split {number}, epsilon {epsilon:g}, {system}: {100 * score.accuracy:.2f} %")
    return known


def _wanted() -> Iterator[tuple[str, float]]:
    for system in SYSTEMS:
        for epsilon in (0.0,) if system in WITHOUT_EPSILON else EPSILONS:
            yield system, epsilon


def summaries(found: Sequence[ScoreRow]) -> list[Summary]:
    """Return the table: for each task and epsilon every system, beside ours on the same splits."""
    by_key = {(row.task, row.epsilon, row.system, row.split): row for row in found}
    table = []
    for task in dict.fromkeys(row.task for row in found):
        for epsilon in EPSILONS:
            for system in SYSTEMS:
                own = 0.0 if system in WITHOUT_EPSILON else epsilon
                pairs = [
                    (by_key[task, epsilon, OURS, number], by_key[task, own, system, number])
                    for number in sorted({row.split for row in found})
                    if (task, epsilon, OURS, number) in by_key and (task, own, system, number) in by_key
                ]
                if pairs:
                    table.append(_summary(task, epsilon, system, pairs))
    return table


def _summary(task: str, epsilon: float, system: str, pairs: Sequence[tuple[ScoreRow, ScoreRow]]) -> Summary:
    def difference(name: str) -> tuple[float, float, float]:
        values = np.array([100 * (getattr(ours, name) - getattr(other, name)) for ours, other in pairs])
        if len(values) < 2:
            return float(values.mean()), -math.inf, math.inf
        reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
        return float(values.mean()), float(values.mean()) - reach, float(values.mean()) + reach

    return Summary(
        task=task,
        epsilon=epsilon,
        system=system,
        splits=len(pairs),
        accuracy=float(np.mean([100 * other.accuracy for _, other in pairs])),
        auroc=float(np.mean([100 * other.auroc for _, other in pairs])),
        accuracy_difference=difference("accuracy"),
        auroc_difference=difference("auroc"),
    )


def markdown(table: Sequence[Summary]) -> str:
    """Return the table as the page of the documents shows it."""
    lines = [
        "| task | epsilon | who trains | accuracy | AUROC | ours less theirs, accuracy | ours less theirs, AUROC |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        differences = ["" if row.system == OURS else _interval(each) for each in _differences(row)]
        epsilon = "none" if row.system in WITHOUT_EPSILON else f"{row.epsilon:g}"
        lines.append(
            f"| {row.task} | {epsilon} | {row.system} | {row.accuracy:.1f} | {row.auroc:.1f} | "
            f"{differences[0]} | {differences[1]} |"
        )
    return "\n".join(lines)


def _differences(row: Summary) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    return row.accuracy_difference, row.auroc_difference


def _interval(values: tuple[float, float, float]) -> str:
    mean, low, high = values
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def noise_ratio(setting: Setting, sigma: float) -> float:
    """Return how many times the noise in the mean is smaller than if each silo added all of it by itself.

    `sigma` is the noise that a plan asks of the honest silos together; all silos add theirs.
    """
    each_its_own = own_noise(setting) * math.sqrt(SILOS)
    return each_its_own / (sigma * math.sqrt(SILOS / (SILOS - COLLUDERS)))


def _read(path: Path) -> Iterator[ScoreRow]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield ScoreRow(**json.loads(line))
