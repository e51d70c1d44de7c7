"""Membership inference against the released model: how well its loss tells members' records from others'."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from d2pfed.api.audit.bounds import upper_rate
from d2pfed.api.job import Job
from d2pfed.errors import ConfigError
from d2pfed.learning import Examples, example_losses
from d2pfed.ledger import RowKind, read_rows
from d2pfed.numerics.randomness import Entropy
from d2pfed.runs.report import keep_plots
from d2pfed.runs.report.plots import Ink, Line, Plot, draw

LEVELS = (0.001, 0.01, 0.1)  # false positive rates at which the attack is told in numbers
_ALPHA = 0.05  # of the one-sided bound on a true positive rate

SHOWS = (
    "This shows whether one simple attack, a threshold on the loss of the released model, finds members. A better "
    "attack may find more: a curve on the diagonal is no guarantee, the claimed epsilon is."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipCurve:
    """True against false positive rates of an attack that takes clients with a low loss for members."""

    false_positive: NDArray[np.float64] = field(repr=False)  # from no alarm to all
    true_positive: NDArray[np.float64] = field(repr=False)
    members: int  # records that were scored
    others: int
    others_are: str  # where they come from
    epsilon: float  # claimed for one client to an observer of the released models; it bounds the curve
    delta: float
    shows: str = SHOWS

    @property
    def area(self) -> float:
        """The area under the curve: one half for an attack that knows nothing."""
        return float(np.trapezoid(self.true_positive, self.false_positive))

    def at(self, level: float) -> tuple[float, float]:
        """Return the true positive rate at a false positive rate of at most `level`, and its 95 % upper bound."""
        place = int(np.searchsorted(self.false_positive, level, side="right")) - 1
        rate = float(self.true_positive[place])
        return rate, upper_rate(round(rate * self.members), self.members, _ALPHA)

    def summary(self) -> dict[str, object]:
        """Return the attack in numbers."""
        rates = [(level, *self.at(level)) for level in LEVELS]
        levels = [dict(zip(("false_positive", "true_positive", "at_most"), each, strict=True)) for each in rates]
        stated = ("members", "others", "others_are", "epsilon", "delta", "shows")
        return {"area": self.area, "levels": levels} | {name: getattr(self, name) for name in stated}


def curve(members: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return false and true positive rates of all thresholds on scores that are high for members; ties go together."""
    scores = np.concatenate([members, others])
    is_member = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true = np.cumsum(is_member[order])[ends] / len(members)
    false = np.cumsum(1 - is_member[order])[ends] / len(others)
    return np.append(0.0, false), np.append(0.0, true)


def attack_membership(run: Path, job: Job, records: int = 10_000) -> MembershipCurve:
    """Attack the model that a run released, with at most this many records of members and of others.

    Members are records of clients whose vector was in a sum. The others are records of clients that were never asked,
    or validation data where everybody was.
    """
    ledger = run / "ledger.sqlite"
    if job.plan is None or not ledger.exists():
        raise ConfigError(f"the run in {run} has no ledger of its own that tells who took part")
    took_part, asked = set[int](), set[int]()
    for row in read_rows(ledger):
        if row.release is not None:
            asked.update(row.release.participants)
            took_part.update(row.release.participants if row.kind is RowKind.COMMIT else ())
    rest = [client for client in range(job.clients.population) if client not in asked]
    if not took_part:
        raise ConfigError(f"nobody took part in the run in {run}")
    arrays = load_file(run / "model.safetensors")
    params = np.concatenate([arrays[name].reshape(-1) for name in job.model.names])
    outside = iter([] if job.validation is None else [job.validation])
    losses = []
    for parts in (_records(job, sorted(took_part), records), _records(job, rest, records) if rest else outside):
        found = [example_losses(job.model, params, part) for part in parts]
        if not found:
            raise ConfigError("an attack needs at least one record of members and of others, got 0")
        losses.append(np.concatenate(found))
    members, others = losses
    false, true = curve(-members, -others)
    return MembershipCurve(
        false_positive=false,
        true_positive=true,
        members=len(members),
        others=len(others),
        others_are="clients that were never asked" if rest else "validation data",
        epsilon=job.plan.epsilon,
        delta=job.plan.delta,
    )


def _records(job: Job, clients: list[int], most: int) -> Iterator[Examples]:
    """Yield the records of clients in a random order, until there are enough."""
    count = 0
    for place in Entropy.system().stream().permutation(len(clients)):
        found = job.clients.examples(clients[int(place)])
        if not found.are_tensors:
            raise ConfigError("an attack needs clients that hold one tensor of inputs and one of labels")
        if len(found):
            yield found
        count += len(found)
        if count >= most:
            return


def write_plot(found: MembershipCurve, directory: Path) -> Path:
    """Write the curve as plots/membership.png and .svg, both axes logarithmic; return the first."""
    least = 1 / max(found.others, found.members)
    across = np.geomspace(least, 1.0, 200)
    limit = np.minimum(1.0, np.exp(found.epsilon) * across + found.delta)
    limit = np.minimum(limit, 1 - np.exp(-found.epsilon) * (1 - found.delta - across))
    lines = (
        ("by the loss", Ink.MAIN, found.true_positive, found.false_positive),
        ("knows nothing", Ink.TEXT, across, across),
        ("most claimed", Ink.LIMIT, limit, across),
    )
    plot = Plot(
        name="membership",
        title="Membership inference: true positive rate",
        across="false positive rate",
        lines=tuple(Line(name, ink, tuple(ys.tolist()), tuple(xs.tolist())) for name, ink, ys, xs in lines),
        least=least,
    )
    return keep_plots(directory, [(plot, draw(plot))]) / "membership.png"
