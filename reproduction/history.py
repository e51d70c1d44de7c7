"""What a system came to over its seeds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from d2pfed.numerics import canonical
from reproduction.systems import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One run of a system, from one seed; accuracies in percent."""

    seed: int
    validation: tuple[float, ...]  # after each round
    test: float  # of the last model; the test data was opened for it once
    charged: tuple[int, ...]  # attempts up to each round that may have been opened
    server: float | None  # true epsilon against the server; None: not private
    seconds: float  # that its rounds took, on a machine that may have had other work


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """What a system came to over its seeds, round by round and at the end; accuracies in percent."""

    system: System
    repeats: tuple[Repeat, ...]
    released: tuple[float, ...]  # true epsilon of the released models after each round; empty if there is none

    @property
    def validation(self) -> tuple[float, ...]:
        """The mean over the seeds after each round."""
        return tuple(sum(values) / len(values) for values in self._by_round)

    @property
    def band(self) -> tuple[tuple[float, float], ...]:
        """The lowest and the highest of the seeds after each round."""
        return tuple((min(values), max(values)) for values in self._by_round)

    @property
    def tests(self) -> tuple[float, ...]:
        """Test accuracy at the end, by seed."""
        return tuple(each.test for each in self.repeats)

    @property
    def test(self) -> float:
        """The mean test accuracy at the end."""
        return sum(self.tests) / len(self.tests)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest test accuracy at the end."""
        return min(self.tests), max(self.tests)

    @property
    def server(self) -> float | None:
        """The true epsilon against the server, the largest of the seeds; None: not private."""
        known = [each.server for each in self.repeats if each.server is not None]
        return max(known) if known else None

    @property
    def rounds(self) -> range:
        """The numbers of the rounds."""
        return range(1, len(self.repeats[0].validation) + 1)

    @property
    def megabytes(self) -> tuple[float, ...]:
        """What one client that took part in every round has sent after each."""
        return tuple(number * self.system.upload_bytes / 1e6 for number in self.rounds)

    @property
    def published(self) -> tuple[float, ...]:
        """Epsilon after each round as the paper would print it; empty where it printed none."""
        given = self.system.published
        return () if given is None else tuple(given(number) for number in self.rounds)

    @property
    def record(self) -> dict[str, object]:
        """What was run, for the result's JSON."""
        system, experiment = self.system, self.system.workload.experiment
        return {
            "seeds": [each.seed for each in self.repeats],
            "seconds": [round(each.seconds, 1) for each in self.repeats],
            "data": system.workload.task.description,
            "partition": system.workload.partition,
            "model": experiment.model,
            "rounds": len(self.rounds),
            "work": json.loads(canonical.encode(system.work)) if system.work is not None else None,
            "local": asdict(system.local),
            "server": asdict(system.step),
        }

    @property
    def _by_round(self) -> Sequence[tuple[float, ...]]:
        return list(zip(*(each.validation for each in self.repeats), strict=True))
