"""What a client of a plan sends and receives: in one attempt, and once when it joins a run.

Every byte is counted that a deployment hands to its transport: the run's announcement, the task, the head of each
request. Names of arrays and settings differ from model to model: one array of parameters is counted, and no settings.
"""

from dataclasses import dataclass
from typing import Any

from d2pfed.noise.mechanisms import Protocol, Shared
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import model_size
from d2pfed.plan.bounds import VERIFIED_DEPTH, cohorts_to_choose
from d2pfed.plan.plan import Plan
from d2pfed.secagg import traffic
from d2pfed.secagg.crypto import SIGNATURE_BYTES
from d2pfed.secagg.lattice.session import Session as LatticeSession
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.traffic import Traffic
from d2pfed.secagg.trust import Consistency


@dataclass(frozen=True, slots=True)
class PlanTraffic:
    """Bytes of an attempt in which nobody drops out, and of joining a run.

    Attributes:
        client: an ordinary client's.
        member: that of a member of the committee, where there is one.
        roster: the list of all enrolled clients, in the lattice protocol its head and the client's own slip; 0 where
            nobody is enrolled.
        joining: what is sent and received once in a run, the roster and standing keys among it.
    """

    client: Traffic
    member: Traffic | None
    roster: int
    joining: Traffic


# As `deploy.requests` and `deploy.layout` write them; test_plan_traffic.py compares.
_LAYOUT = '{{"":"Layout","entries":[{{"":"ArraySpec","name":"params","shape":[{}],"type":"float32"}}]}}'
_SETTINGS = '{"server-round": 1}'
_RUN = 16 * "x"
_VERSIONS_BYTES = 1 + len("0.1.0") + 2 * 2
_ENVELOPE_BYTES = 2 * 8 + 1  # of each request: how long the server waits, and where the model is
_BLOB_BYTES = 32 + 8  # of a model that is no part of its request
_SMALLEST_BLOB = 1 << 16


def _joining(plan: Plan, roster: int) -> Traffic:
    """Return what joining a run takes: where clients hold no roster a greeting, then the announcement."""
    signed = plan.consistency is Consistency.SIGNED
    fixed = _VERSIONS_BYTES + 8 + 5 * 4 + len(_RUN)
    greeted = _VERSIONS_BYTES + 8 + 8 + 4  # who answers, and that it has begun nothing of this run yet
    accepted = greeted + SIGNATURE_BYTES * signed
    announced = fixed + len(canonical.encode(plan)) + len(_LAYOUT.format(plan.dimension)) + roster
    if plan.committee is None or not signed:
        return Traffic(accepted, announced)
    return Traffic(accepted + greeted, announced + fixed)


def _deployed(plan: Plan, counted: Traffic, requests: int) -> Traffic:
    """Return the traffic with the task and the heads of this number of requests."""
    task = 4 + len(_LAYOUT.format(plan.dimension)) + len(_SETTINGS)
    is_blob = plan.committee is not None or model_size(plan.dimension, plan.download_bits) >= _SMALLEST_BLOB
    received = counted.received + task + requests * _ENVELOPE_BYTES + _BLOB_BYTES * is_blob
    return Traffic(counted.sent, received)


def traffic_of(plan: Plan) -> PlanTraffic | None:
    """Return the traffic of a plan, for a run of a name of 16 letters; None if no protocol carries it."""
    cohort, is_signed = tuple(range(plan.cohort_size)), plan.consistency is Consistency.SIGNED
    depth = VERIFIED_DEPTH if is_signed and cohorts_to_choose(plan.sampling, 1) else None
    model = model_size(plan.dimension, plan.download_bits)
    roster = traffic.roster_bytes(plan.sampling.population) * is_signed
    named: dict[str, Any] = {
        "plan_digest": plan.digest,
        "run": _RUN,
        "round": 0,
        "attempt": 0,
        "roster_digest": plan.digest if is_signed else NO_ROSTER,
        "cohort": cohort,
        "dimension": plan.codec.length,
        "bits": plan.ring.bits,
        "quorum": plan.quorum,
        "colluders": plan.colluders,
    }
    if plan.committee is not None and plan.secret is not None:
        members = cohort[: plan.committee.size]
        session = LatticeSession(
            **named, members=members, secret=plan.secret, committee=plan.committee, is_by_slot=is_signed
        )
        sizes, head = (session, depth, model), traffic.head_bytes() * is_signed
        client, member = traffic.lattice_traffic(*sizes), traffic.member_traffic(*sizes)
        asked = 5 if is_signed else 3
        return PlanTraffic(_deployed(plan, client, 1), _deployed(plan, member, asked), head, _joining(plan, head))
    match plan.protocol:
        case Protocol.STANDING:
            sent = traffic.standing_traffic(plan.cohort_size, plan.ring.packed_bytes(plan.codec.length), model)
            keys, once = traffic.standing_keys_traffic(plan.cohort_size, _RUN), _joining(plan, roster)
            joining = Traffic(once.sent + keys.sent, once.received + keys.received + 2 * _ENVELOPE_BYTES)
            return PlanTraffic(_deployed(plan, sent, 1), None, roster, joining)
        case Protocol.PAIRWISE:
            delivery = Delivery.EVERYONE if isinstance(plan.mechanism, Shared) else Delivery.QUORUM
            named |= {"threshold": plan.threshold, "delivery": delivery, "consistency": plan.consistency}
            sent = traffic.pairwise_traffic(Session(**named), depth, model)
            return PlanTraffic(_deployed(plan, sent, 4 + is_signed), None, roster, _joining(plan, roster))
        case _:
            return None
