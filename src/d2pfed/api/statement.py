"""What a certificate states: accounting events, claims, and every fact that a reader needs to judge them."""

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    Adjacency,
    Guarantee,
    Release,
    Sampling,
    Unit,
)
from d2pfed.certificate_verifier import CONDITIONS, FORMAT
from d2pfed.errors import ConfigError
from d2pfed.ledger import Budget, ChargedRun, Head, RowKind, RunPlan, Verification, read_rows, verify
from d2pfed.ledger.software import software_digest
from d2pfed.plan.plan import guarantees, run_guarantee
from d2pfed.runs.report import RunReport

Json = dict[str, object]
_PACKAGES = ("numpy", "scipy", "numba", "cryptography", "dp-accounting")


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What a ledger says that holds together: its charged runs, each with the head after its row."""

    found: Verification
    runs: tuple[tuple[Head, ChargedRun], ...]
    hashes: tuple[bytes, ...]  # of all rows

    @staticmethod
    def read(path: Path) -> "LedgerRecord":
        """Return it after checking everything from the rows alone; one without a run, or with a seed, is refused."""
        if not path.is_file():
            raise ConfigError(f"there is no ledger at {path}")
        found, rows = verify(path), read_rows(path)
        begun = [(row.head, row.charged_run) for row in rows if row.kind is RowKind.BEGIN]
        runs = tuple((head, run) for head, run in begun if run is not None)
        if not runs:
            raise ConfigError(f"{path} has charged no run: there is nothing to certify")
        if seeded := [run.run for _, run in runs if run.repeatable]:
            raise ConfigError(
                f"the run {seeded[0]} on {path} repeats from its seed, which undoes its noise: there is nothing to "
                "certify"
            )
        return LedgerRecord(found, runs, tuple(row.hash for row in rows))

    def require_head(self, head: Head, where: str) -> None:
        """Refuse a ledger that does not hold a row which someone has seen."""
        if head.seq >= len(self.hashes) or self.hashes[head.seq] != head.hash:
            raise ConfigError(
                f"the ledger does not hold row {head.seq} as {where} has seen it: an older or another one"
            )

    def as_of(self, head: Head) -> tuple[tuple[Head, ChargedRun], ...]:
        """Return the runs that were charged up to a head."""
        return tuple((own, begun) for own, begun in self.runs if own.seq <= head.seq)


def event(head: Head, begun: ChargedRun) -> Json:
    """Return one charged run as a certificate has it: what it may release at worst, nothing of who took part."""
    named = {"run": begun.run, "row": head.encode(), "software": begun.software or "not recorded"}
    return named | planned(begun.plan)


def planned(plan: RunPlan) -> Json:
    """Return what a run is charged for, or was declared as, by all that its cost depends on."""
    release = plan.release
    noise = release.noise
    rate, coins = _coins(release)
    contributors, dimension = (getattr(release.noise, name, 1) for name in ("contributors", "dimension"))
    return {
        "plan": plan.plan.hex(),
        "unit": release.unit.value,
        "adjacency": release.adjacency.value,
        "method": release.sampling.method.value,
        "population": release.sampling.population,
        "cohort_size": release.sampling.cohort_size,
        "rate": str(rate),
        "coins": coins,
        "kind": noise.kind,
        "variance": str(noise.one_variance),
        "contributors": contributors,
        "radius": str(Fraction(release.noise.radius)),
        "l1_radius": str(noise.l1_bound),
        "dimension": dimension,
        "releases": plan.max_attempts,
        # A silo sends a vector in every attempt, so a record has no cap of its own.
        "max_participations": plan.max_participations if release.batches is None else plan.max_attempts,
    }


def _coins(release: Release) -> tuple[Fraction, int]:
    """Return the probability that a unit is in a release, and how many such coins it has."""
    if release.batches is not None:
        return release.batches.rate, release.batches.max_silos
    return Fraction(release.sampling.cohort_size, release.sampling.population), 1


def claim(scope: str, runs: Sequence[str], item: Guarantee) -> Json:
    """Return one guarantee as a certificate claims it; an infinite epsilon is null."""
    return {
        "scope": scope,
        "runs": list(runs),
        "observer": str(item.observer),
        "epsilon": float(item.epsilon) if math.isfinite(item.epsilon) else None,
        "delta": float(item.delta),
        "unit": item.unit.value,
        "adjacency": item.adjacency.value,
        "accountant": item.accountant,
        "sampling": item.sampling,
        "max_participations": item.max_participations,
        "reason": item.reason,
        "condition": CONDITIONS[scope],
    }


def _own_guarantees(begun: ChargedRun) -> tuple[Guarantee, ...]:
    """Return what a charged run guarantees against each observer, from what the ledger has of it."""
    plan = begun.plan
    observers = dict.fromkeys((RELEASED, SERVER, CLIENT, plan.observer, ALONE))
    return tuple(
        run_guarantee(plan.release, plan.max_attempts, observer, plan.delta, plan.max_participations)
        for observer in observers
    )


def _claims(report: RunReport | None, own: ChargedRun | None, record: LedgerRecord) -> list[Json]:
    if report is not None and report.plan is not None and own is not None:
        found = [claim("run", [own.run], item) for item in guarantees(report.plan)]
    else:
        found = [claim("run", [begun.run], item) for _, begun in record.runs for item in _own_guarantees(begun)]
    if len(record.runs) > 1:
        whole, last = record.found, record.runs[-1][1].plan
        together = Guarantee(
            epsilon=whole.spent,
            delta=whole.budget.delta,
            observer=whole.budget.observer,
            unit=last.release.unit,
            adjacency=last.release.adjacency,
            sampling="that of each run",
            max_participations=max(begun.plan.max_participations for _, begun in record.runs),
            accountant="all runs composed",
        )
        found.append(claim("composed", [begun.run for _, begun in record.runs], together))
    return found


_UNITS = {
    Unit.CLIENT: "everything that one client holds and contributes, in all rounds of a run",
    Unit.RECORD: "one record of a silo, or all rows of one owner in it where groups are given, in all rounds of a run",
}
_NEIGHBOURS = {
    Adjacency.REPLACE_ONE: "a unit's contributions are any others within the clip; it adds its noise in both worlds",
    Adjacency.ZERO_OUT: "a unit's contributions are zero; it adds its noise in both worlds",
    Adjacency.ADD_REMOVE: "a record is there or not; its silo adds its noise in both worlds",
}
_DRAWN = {
    Sampling.FIXED: "a fresh uniform cohort of known size for each charged attempt",
    Sampling.ONCE: "a random partition: each client is in one cohort of the run; nothing is amplified",
    Sampling.NONE: "cohorts that are known or were not drawn at random; nothing is amplified",
}
_BY_COINS = "every silo in every attempt; in each, every record by a secret coin of its silo, which amplifies"


def statement(
    report: RunReport | None, own: ChargedRun | None, record: LedgerRecord, *, facts: Json, issued: str
) -> Json:
    """Return everything that a certificate states; `facts` are those of the subject: a run's, or a ledger's."""
    release, found = (own or record.runs[-1][1]).plan.release, record.found
    return facts | {
        "format": FORMAT,
        "issued": issued,
        "unit": {"name": release.unit.value, "means": _UNITS.get(release.unit, f"one {release.unit.value}")},
        "adjacency": {
            "name": release.adjacency.value,
            "means": _NEIGHBOURS.get(release.adjacency, release.adjacency.value),
        },
        "tuning": {
            "runs_on_this_ledger": len(record.runs),
            "means": "Runs that were made to choose settings and drew on this ledger are among its events. Runs over "
            "the same clients that drew on another ledger, or on none, are not covered.",
        },
        "evaluation": _EVALUATION,
        "software": {
            "name": "d2pfed",
            "version": version("d2pfed"),
            "digest": software_digest(),
            "python": platform.python_version(),
            "packages": {name: version(name) for name in _PACKAGES},
        },
        "events": [event(head, begun) for head, begun in record.runs],
        "claims": _claims(report, own, record),
        "ledger": {
            "head": found.head.encode(),
            "runs": len(record.runs),
            "budget": allowed(found.budget),
            "means": "the claim of a ledger is its budget: it holds whatever runs and stops were chosen from outputs",
        },
    }


def allowed(budget: Budget) -> Json:
    """Return what a ledger allows to be spent."""
    return {
        "epsilon": float(budget.epsilon),
        "delta": float(budget.delta),
        "observer": str(budget.observer),
        "declared": [planned(plan) for plan in budget.declared],
    }


def drawn(release: Release, enforced_by: str) -> Json:
    """Return how cohorts are sampled, and who sees to it."""
    sampling = release.sampling
    return {
        "method": sampling.method.value,
        "means": _DRAWN[sampling.method] if release.batches is None else _BY_COINS,
        "population": sampling.population,
        "cohort_size": sampling.cohort_size,
        "rate": str(_coins(release)[0]),
        "enforced_by": enforced_by,
    }


# What NIST SP 800-226 asks beside the guarantee itself.
_EVALUATION: Json = {
    "utility": "The noise is that of the plan; metrics of the model are in the run's report and are not certified.",
    "bias": "Clients with few data, with large updates (they are clipped) or with bad connections count for less; this "
    "is not measured here.",
    "algorithm": "Theorems and proofs: docs/theory.md; exact and adversarial tests: docs/threats.md.",
    "floating_point": "None in the path of the noise: updates are integers of a fine grid, their norm is checked "
    "in exact integers, and noise comes from exact samplers over the system's entropy.",
    "side_channels": "Not covered: times, memory and messages other than those of the protocol; see docs/threats.md.",
    "security": "Vectors are masked by secure aggregation; keys and shares are encrypted from client to client.",
    "data_collection": "Raw data stay with the clients; what leaves a client is one masked vector for each attempt.",
}
