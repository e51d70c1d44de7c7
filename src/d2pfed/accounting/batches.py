"""Equal releases of a run counted together: what an account needs of a long list."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from d2pfed.accounting.release import CohortSampling, Noise, Release, Sampling
from d2pfed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunBatch:
    """One run as an account needs it.

    Attributes:
        sampling: how its cohorts were drawn.
        noises: each noise and how often it was released.
        max_participations: how often one client contributes before it sends zeros.
        blocks: of a partition, in how many releases a client is known to be: 1, unless participants show that a
            block was used again.
    """

    sampling: CohortSampling
    noises: tuple[tuple[Noise, int], ...]
    max_participations: int
    blocks: int = 1

    @property
    def count(self) -> int:
        """How many releases there were."""
        return sum(count for _, count in self.noises)


def batches(releases: Sequence[Release], max_participations: int) -> list[RunBatch]:
    """Return the releases by run, in the order in which runs began; each run has one sampling."""
    # Long lists repeat few objects, and an object's identity is found much faster than its value.
    objects = {id(release): release for release in releases}
    noises: defaultdict[str, Counter[Noise]] = defaultdict(Counter)
    samplings: dict[str, CohortSampling] = {}
    for key, count in Counter(map(id, releases)).items():
        release = objects[key]
        noises[release.run][release.noise] += count
        if samplings.setdefault(release.run, release.sampling) != release.sampling:
            raise ConfigError(f"all releases of a run must share one sampling, run {release.run!r} has two")
    blocks = _blocks(releases)
    return [
        RunBatch(samplings[run], tuple(noises[run].items()), max_participations, blocks.get(run, 1))
        for run in noises
    ]


def _blocks(releases: Sequence[Release]) -> dict[str, int]:
    participations: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for release in releases:
        if release.sampling.method is Sampling.ONCE and release.participants:
            participations[release.run].update(release.participants)
    return {run: max(counts.values()) for run, counts in participations.items()}
