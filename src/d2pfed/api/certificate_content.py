"""What a certificate states of a run or a ledger: events, claims, and every fact that a reader needs to judge them."""

import math
import platform
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    UNCOUNTED,
    Adjacency,
    Guarantee,
    Release,
    Sampling,
    Unit,
    is_amplified,
)
from d2pfed.accounting.laws import ContinuousGaussian, DiscreteGaussianSum, l1_radius
from d2pfed.certificate_verifier import CONDITIONS, FORMAT
from d2pfed.errors import ConfigError
from d2pfed.ledger import Budget, ChargedRun, Head, RowKind, RunPlan, Verification, read_rows, verify
from d2pfed.ledger.budget import decode_body
from d2pfed.ledger.files import software_digest
from d2pfed.noise.mechanisms import MechanismName
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.plan.plan import guarantees, run_guarantee
from d2pfed.runs.report import RunReport
from d2pfed.secagg.trust import Consistency

Json = dict[str, object]
_PACKAGES = ("numpy", "scipy", "numba", "cryptography", "dp-accounting")
_UNITS = {
    Unit.CLIENT: "everything that one client holds and contributes, in all rounds of a run",
    Unit.RECORD: "one record of a silo, or all rows of one owner in it where groups are given, in all rounds of a run",
}
_NEIGHBORS = {
    Adjacency.REPLACE_ONE: "a unit's contributions are any others within the clip; it adds its noise in both worlds",
    Adjacency.ZERO_OUT: "a unit's contributions are zero; it adds its noise in both worlds",
    Adjacency.ADD_REMOVE: "a record is there or not; its silo adds its noise in both worlds",
}
_DRAWN = {
    Sampling.FIXED: "a fresh uniform cohort of known size for each charged attempt",
    Sampling.ONCE: "a random partition: each client is in one cohort of the run",
    Sampling.NONE: "cohorts that are known or were not drawn at random; nothing is amplified",
}
_BY_COINS = "every silo in every attempt; in each, every record by a secret coin of its silo, which amplifies"
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
_NOT_COVERED = [
    "What the model's evaluation data reveal: metrics are computed on data that the guarantee is not about.",
    "Clients that hold data about the same person: the unit is the one that is stated.",
    "A client whose machine or app is not its own: anyone who reads its memory has its data and its noise.",
    "Side channels, availability, and poisoned updates within the clip.",
]
_LAST = "the last run; each event has that of its own"
_SIMULATION = (
    "A server that keeps to the protocol. If all clients ran in one process (a simulation), that process had all data "
    "and all noise, and its operator must be trusted."
)
_DEPLOYMENT = (
    "Enrolled clients under a roster that an authority has signed. The server may deviate from the protocol and "
    "collude with the stated number of clients of a cohort; the authority must know whom it enrols."
)


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
        begun = [row for row in rows if row.kind is RowKind.BEGIN]
        runs = tuple((row.head, decode_body(row.body, ChargedRun)) for row in begun)
        if not runs:
            raise ConfigError(f"{path} has charged no run: there is nothing to certify")
        if seeded := [run.run for _, run in runs if run.repeatable]:
            raise ConfigError(
                f"the run {seeded[0]} on {path} can be repeated from its seed, which removes its noise: there is "
                "nothing to certify"
            )
        return LedgerRecord(found, runs, tuple(row.hash for row in rows))

    def require_head(self, head: Head, where: str) -> None:
        """Refuse a ledger that does not hold a row which someone has seen."""
        if head.seq >= len(self.hashes) or self.hashes[head.seq] != head.hash:
            raise ConfigError(f"the ledger lacks row {head.seq} as {where} has seen it: an older or another one")


def event(head: Head, begun: ChargedRun) -> Json:
    """Return one charged run as a certificate has it: what it may release at worst, nothing of who took part."""
    named = {"run": begun.run, "row": head.encode(), "software": begun.software or "not recorded"}
    return named | planned(begun.plan)


def planned(plan: RunPlan) -> Json:
    """Return what a run is charged for, or was declared as, by all that its cost depends on."""
    release, noise = plan.release, plan.release.noise
    contributors, dimension = (getattr(noise, name, 1) for name in ("contributors", "dimension"))
    if isinstance(noise, DiscreteGaussianSum):
        l1 = l1_radius(noise.radius, noise.dimension)
    else:
        l1 = Fraction(noise.radius) if isinstance(noise, ContinuousGaussian) else noise.l1_radius
    return {
        "plan": plan.plan.hex(),
        "unit": release.unit.value,
        "adjacency": release.adjacency.value,
        "method": release.sampling.method.value,
        "population": release.sampling.population,
        "cohort_size": release.sampling.cohort_size,
        "rate": str(_rate(release)),
        "coins": release.max_silos,
        "kind": noise.kind,
        "variance": str(noise.one_variance),
        "contributors": contributors,
        "radius": str(Fraction(release.noise.radius)),
        "l1_radius": str(l1),
        "dimension": dimension,
        "releases": plan.max_attempts,
        # A silo sends a vector in every attempt, so a record has no cap of its own.
        "max_participations": plan.max_participations if release.batches is None else plan.max_attempts,
    }


def _rate(release: Release) -> Fraction:
    """Return the probability that a unit is in a release: a client's, or that of each coin of a record's."""
    drawn = Fraction(release.sampling.cohort_size, release.sampling.population)
    return drawn if release.batches is None else release.batches.rate


def statement(
    report: RunReport | None, own: ChargedRun | None, record: LedgerRecord, *, facts: Json, issued: str
) -> Json:
    """Return everything that a certificate states; `facts` are those of the subject: a run's, or a ledger's."""
    release, found = (own or record.runs[-1][1]).plan.release, record.found
    claimed: list[tuple[str, list[str], Guarantee]] = []
    if report is not None and report.plan is not None and own is not None:
        claimed = [("run", [own.run], item) for item in guarantees(report.plan)]
    else:
        for _, begun in record.runs:
            plan = begun.plan
            for observer in dict.fromkeys((RELEASED, SERVER, CLIENT, plan.observer, ALONE)):
                given = plan.release, plan.max_attempts, observer, plan.delta, plan.max_participations
                claimed.append(("run", [begun.run], run_guarantee(*given)))
    if len(record.runs) > 1:
        last = record.runs[-1][1].plan
        together = Guarantee(
            epsilon=found.spent,
            delta=found.budget.delta,
            observer=found.budget.observer,
            unit=last.release.unit,
            adjacency=last.release.adjacency,
            sampling="that of each run",
            max_participations=max(begun.plan.max_participations for _, begun in record.runs),
            accountant="all runs composed",
        )
        claimed.append(("composed", [begun.run for _, begun in record.runs], together))
    return facts | {
        "format": FORMAT,
        "issued": issued,
        "unit": {"name": release.unit.value, "means": _UNITS[release.unit]},
        "adjacency": {"name": release.adjacency.value, "means": _NEIGHBORS[release.adjacency]},
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
        "claims": [
            {
                "scope": scope,
                "runs": runs,
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
            for scope, runs, item in claimed
        ],
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
        "rate": str(_rate(release)),
        "enforced_by": enforced_by,
    }


def run_facts(run: Path, report: RunReport, plan: Plan, own: ChargedRun) -> Json:
    """Return the facts of a training run: from its plan, and nothing that tells who took part."""
    signed = plan.consistency is Consistency.SIGNED
    model = run / "model.safetensors"
    drawn_by = "the server alone"
    if plan.batches is not None:
        drawn_by = "each silo, by secret coins of its own; all silos are asked"
    elif plan.sampling.method is Sampling.NONE:
        drawn_by = "nobody: the cohort is taken to be known"
    elif signed:
        drawn_by = (
            "each client, from seeds that the server had committed to before the authority drew its nonce; under a "
            "roster without draws the server alone"
        )
    return {
        "subject": {
            "kind": "training run",
            "name": own.run,
            "title": report.title,
            "data": report.data,
            "rounds_planned": plan.rounds,
            "end": report.summary.end.value,
        },
        "released": {
            "what": "the noisy mean over the planned cohort of each charged attempt, and every model made from them",
            "at_most": plan.max_attempts,
            "model_sha256": sha256(model.read_bytes()).hexdigest() if model.is_file() else None,
        },
        "mechanism": {
            "name": MechanismName.of(plan.mechanism).value,
            "clip": "adaptive" if plan.adaptive_clip is not None else plan.codec.clip,
            "sigma": plan.sigma,
            "noise_multiplier": plan.noise_multiplier,
            "dimension": plan.codec.length,
            "bits": plan.ring.bits,
            "wrap_probability": plan.wrap_probability,
        },
        "sampling": drawn(own.plan.release, drawn_by),
        "participations": {
            "max_participations": plan.max_participations,
            "enforced_by": "each client, from its own log of all that it has sent"
            if signed
            else "the process that simulates the clients, from the ledger",
        },
        "colluders": {
            "of_a_cohort": plan.colluders,
            "means": "that many clients of a cohort may tell the server all they know; `against` colluding names them",
        },
        "dropouts": {
            "tolerated": plan.cohort_size - plan.quorum,
            "quorum": plan.quorum,
            "means": f"noise is counted as that of {plan.quorum} clients, the fewest that may be opened",
        },
        "trust_model": {
            "name": f"distributed, by secure aggregation: {plan.protocol or 'simulated'}",
            "consistency": plan.consistency.value,
            "against": str(plan.against),
            "means": _DEPLOYMENT if signed else _SIMULATION,
        },
        "assumptions": _assumptions(plan),
        "not_covered": _NOT_COVERED,
        "plan": canonical.encode(plan),
    }


def _assumptions(plan: Plan) -> list[str]:
    found = [
        "The system's entropy, SHA-256, AES-256, X25519 and Ed25519 are sound.",
        "At most the stated number of clients of a cohort collude, and honest clients run the stated software.",
        "What a client trains depends on released sums and its own data, never on its own noise.",
    ]
    is_drawn = plan.cohort_size < plan.sampling.population and plan.sampling.method is not Sampling.NONE
    if plan.colluders and is_drawn:
        found.append(f"That a drawn cohort has more colluders than stated has a chance of at most {UNCOUNTED}.")
    if plan.committee is not None:
        size, colluders, width = plan.committee.size, plan.committee.colluders, float(plan.least_width)
        found += [
            f"LWE is hard with secrets of {plan.secret} numbers, {plan.ring.bits} bits and noise of {width:.4g} steps.",
            "Boxes of shares are under X25519, which is not post-quantum.",
            f"At most {colluders} of the {size} members of a committee collude, fixed before the draw.",
            f"That a drawn committee has more colluders than stated has a chance of at most {UNCOUNTED}.",
        ]
    if plan.batches is not None:
        found += [
            "Each silo tosses a fresh secret coin for each of its records in every attempt.",
            "No batch and no size of one becomes known, nor how long it took to compute.",
            "A record's gradient depends on that record and the model alone.",
        ]
    if is_amplified(plan.sampling):
        found += [
            "For `released`: cohorts were drawn as stated, afresh for each charged attempt.",
            "For `released`: who reads the models does not learn who took part. The clients of a cohort do.",
            "For `released`: who sees the ledger, the server's log or its traffic has the row `server` instead.",
            "For `released`: dropping out depends neither on who was drawn nor on what a client holds.",
            "For `released`: no attempt that was void asked for vectors, as clients count these towards their cap.",
            "For `released`: no client's own budget ends before its cap; no client keeps a state from round to round.",
        ]
    if plan.sampling.method is Sampling.ONCE:
        found += [
            "No client is in two cohorts of the run, and dropping out does not depend on data.",
            "For `released`, where it is below `server`: a reader of the models does not learn who took part when.",
            "For `released`, where it is below `server`: no dropout or failure depends on who was drawn or on sums.",
            "For `released`, where it is below `server`: no client refuses because its own budget is spent.",
        ]
    return found


def ledger_facts(path: Path, record: LedgerRecord) -> Json:
    """Return the facts of a ledger: those of its charged runs, whose plans it names by their digests."""
    _, last = record.runs[-1]
    release = last.plan.release
    unknown = "not in the ledger: it is in each run's plan, whose digest the event names"
    return {
        "subject": {
            "kind": "ledger",
            "name": path.resolve().name,
            "runs": [begun.run for _, begun in record.runs],
        },
        "released": {
            "what": "one noisy sum for each charged attempt of each run, and everything computed from them",
            "at_most": sum(begun.plan.max_attempts for _, begun in record.runs),
        },
        "mechanism": {"name": unknown, "noise": type(release.noise).__name__, "of": _LAST},
        "sampling": drawn(release, unknown) | {"of": _LAST},
        "participations": {
            "means": "at most that of the ledger's budget; each event has its own",
            "enforced_by": unknown,
        },
        "colluders": {"means": "those that the budget's observer names"},
        "dropouts": {"means": "noise is counted as that of the fewest clients that may be opened, in each event"},
        "trust_model": {"name": "distributed, by secure aggregation", "means": unknown},
        "assumptions": [
            "Every run over these clients drew on this ledger.",
            "The system's entropy and the ciphers are sound, and honest clients run the stated software.",
            f"That a drawn cohort has more colluders than a plan allows for has a chance of at most {UNCOUNTED}.",
        ],
        "not_covered": _NOT_COVERED,
        "plan": None,
    }
