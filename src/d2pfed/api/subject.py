"""The facts of what a certificate is about: a training run by its plan, or a ledger by its charged runs."""

from hashlib import sha256
from pathlib import Path

from d2pfed.accounting import UNCOUNTED, Sampling, is_amplified
from d2pfed.api.statement import Json, LedgerRecord, drawn
from d2pfed.errors import ConfigError
from d2pfed.ledger import ChargedRun
from d2pfed.noise.mechanisms import MechanismName
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.runs.report import RunReport
from d2pfed.secagg.graph import Consistency

_NOT_COVERED = [
    "What the model's evaluation data reveal: metrics are computed on data that the guarantee is not about.",
    "Clients that hold data about the same person: the unit is the one that is stated.",
    "A client whose machine or app is not its own: whoever reads its memory has its data and its noise.",
    "Side channels, availability, and poisoned updates within the clip.",
]
_LAST = "the last run; each event has that of its own"
_SIMULATION = (
    "A server that keeps to the protocol. If all clients ran in one process (a simulation), that process had all data "
    "and all noise, and whoever controls it must be trusted."
)
_DEPLOYMENT = (
    "Enrolled clients under a roster that an authority has signed. The server may deviate from the protocol and "
    "collude with the stated number of clients of a cohort; the authority must know whom it enrols."
)


def require_certifiable(run: Path, report: RunReport) -> Plan:
    """Return the plan of a run that guarantees something; a run in the clear is refused."""
    if report.plan is None:
        raise ConfigError(f"the run in {run} was trained in the clear: there is nothing to certify")
    return report.plan


def run_facts(run: Path, report: RunReport, plan: Plan, own: ChargedRun) -> Json:
    """Return the facts of a training run: from its plan, and nothing that tells who took part."""
    signed = plan.consistency is Consistency.SIGNED
    model = run / "model.safetensors"
    missing = plan.cohort_size - plan.quorum
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
        "mechanism": _mechanism(plan),
        "sampling": drawn(own.plan.release, _who_draws(plan, signed=signed)),
        "participations": {
            "max_participations": plan.max_participations,
            "enforced_by": "each client, from its own log of all that it has sent"
            if signed
            else "the process that simulates the clients, from the ledger",
        },
        "colluders": {
            "of_a_cohort": plan.colluders,
            "means": "so many clients of a cohort may tell the server all they know; `against` colluding names them",
        },
        "dropouts": {
            "tolerated": missing,
            "quorum": plan.quorum,
            "means": f"noise is counted as that of {plan.quorum - plan.cut_off} clients, the fewest that may be opened",
        },
        "trust_model": {
            "name": "distributed, by secure aggregation",
            "consistency": plan.consistency.value,
            "against": str(plan.against),
            "means": _DEPLOYMENT if signed else _SIMULATION,
        },
        "assumptions": _assumptions(plan),
        "not_covered": _NOT_COVERED,
        "plan": canonical.encode(plan),
    }


def _mechanism(plan: Plan) -> Json:
    return {
        "name": MechanismName.of(plan.mechanism).value,
        "clip": "adaptive" if plan.adaptive_clip is not None else plan.codec.clip,
        "sigma": plan.sigma,
        "noise_multiplier": plan.noise_multiplier,
        "dimension": plan.codec.length,
        "bits": plan.ring.bits,
        "wrap_probability": plan.wrap_probability,
    }


def _who_draws(plan: Plan, *, signed: bool) -> str:
    if plan.batches is not None:
        return "each silo, by secret coins of its own; all silos are asked"
    if plan.sampling.method is Sampling.NONE:
        return "nobody: the cohort is taken to be known"
    if signed:
        return (
            "each client, from seeds that the server had committed to before the authority drew its nonce; under a "
            "roster without draws the server alone"
        )
    return "the server alone"


def _assumptions(plan: Plan) -> list[str]:
    found = [
        "The system's entropy, SHA-256, AES-256, X25519 and Ed25519 are sound.",
        "At most the stated number of clients of a cohort collude, and honest clients run the stated software.",
        "What a client trains depends on released sums and its own data, never on its own noise.",
    ]
    if (
        plan.colluders
        and plan.cohort_size < plan.sampling.population
        and plan.sampling.method is not Sampling.NONE
    ):
        found.append(f"That a drawn cohort has more colluders than stated has a chance of at most {UNCOUNTED}.")
    if plan.consistency is Consistency.SIGNED and plan.neighbours < plan.cohort_size - 1:
        found.append(
            "That the graph of shares lets a server open less than a quorum: 2^-40, which is not in delta."
        )
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
            "For `released`: no client's own budget ends before its cap; no client keeps a state from round to round.",
        ]
    if plan.sampling.method is Sampling.ONCE:
        found.append("No client is in two cohorts of the run, and dropping out does not depend on data.")
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
        "trust_model": {
            "name": "distributed, by secure aggregation",
            "means": unknown,
        },
        "assumptions": [
            "Every run over these clients drew on this ledger.",
            "The system's entropy and the ciphers are sound, and honest clients run the stated software.",
            f"That a drawn cohort has more colluders than a plan allows for has a chance of at most {UNCOUNTED}.",
        ],
        "not_covered": _NOT_COVERED,
        "plan": None,
    }
