"""What a client of a plan sends and receives in one attempt."""

from dataclasses import dataclass
from typing import Any

from d2pfed.noise.mechanisms import Protocol, Shared
from d2pfed.numerics.model_bytes import model_size
from d2pfed.plan.bounds import VERIFIED_DEPTH, cohorts_to_choose
from d2pfed.plan.plan import Plan
from d2pfed.secagg import traffic
from d2pfed.secagg.lattice.session import Session as LatticeSession
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.traffic import Traffic
from d2pfed.secagg.trust import Consistency


@dataclass(frozen=True, slots=True)
class PlanTraffic:
    """Bytes of an attempt in which nobody drops out, and of what a client receives once of the roster.

    Attributes:
        client: an ordinary client's.
        member: that of a member of the committee, where there is one.
        roster: the list of all enrolled clients, in the lattice protocol its head and the client's own slip; 0 where
            nobody is enrolled.
    """

    client: Traffic
    member: Traffic | None
    roster: int


def traffic_of(plan: Plan) -> PlanTraffic | None:
    """Return the traffic of a plan, for a run of a name of 16 letters; None if no protocol carries it."""
    cohort, is_signed = tuple(range(plan.cohort_size)), plan.consistency is Consistency.SIGNED
    depth = VERIFIED_DEPTH if is_signed and cohorts_to_choose(plan.sampling, 1) else None
    model = model_size(plan.dimension, plan.download_bits)
    roster = traffic.roster_bytes(plan.sampling.population) * is_signed
    named: dict[str, Any] = {
        "plan_digest": plan.digest,
        "run": 16 * "x",
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
        sizes = session, depth, model
        return PlanTraffic(
            traffic.lattice_traffic(*sizes), traffic.member_traffic(*sizes), traffic.head_bytes() * is_signed
        )
    match plan.protocol:
        case Protocol.STANDING:
            sent = traffic.standing_traffic(plan.cohort_size, plan.ring.packed_bytes(plan.codec.length), model)
            return PlanTraffic(sent, None, roster)
        case Protocol.PAIRWISE:
            delivery = Delivery.EVERYONE if isinstance(plan.mechanism, Shared) else Delivery.QUORUM
            named |= {"threshold": plan.threshold, "delivery": delivery, "consistency": plan.consistency}
            return PlanTraffic(traffic.pairwise_traffic(Session(**named), depth, model), None, roster)
        case _:
            return None
