"""What a guarantee for records says and rests on, in sentences: for reports, the command line and `fit`."""

from d2pfed.accounting import Adjacency, Unit
from d2pfed.plan.plan import Plan

_WORLDS = {
    Adjacency.ADD_REMOVE: "with the record as without it",
    Adjacency.ZERO_OUT: "with the record as with zeros in its place",
    Adjacency.REPLACE_ONE: "with the record as with any other in its place",
}

_ASSUMED = (
    "It rests on this: coins and noise of honest silos are secret and fresh in every attempt; a record's gradient "
    "depends on that record and the model alone; whether a silo answers does not depend on its records or coins; "
    "secure aggregation shows the sum only. A silo itself, and who runs it, sees its own records; the silo as a "
    "whole is not hidden. How long a silo computes is not covered."
)


def record_terms(plan: Plan) -> tuple[str, ...]:
    """Return what a plan with the unit record promises, to whom, and on which terms; nothing for other plans."""
    if plan.unit is not Unit.RECORD or plan.batches is None:
        return ()
    honest = plan.quorum - plan.colluders - plan.cut_off
    return (
        _two_worlds(plan),
        _person(plan.batches.max_silos),
        _drawn(plan, float(plan.batches.rate)),
        (
            f"At least {honest} honest silos add their noise to every sum that is opened: {plan.quorum} of "
            f"{plan.cohort_size} must answer, and {plan.colluders} may tell the server all they know. The coins are "
            "secret, so all observers see amplified sums."
        ),
        _ASSUMED,
    )


def _two_worlds(plan: Plan) -> str:
    return (
        f"Whatever an observer concludes about a record is at most e^epsilon times as likely, plus delta, "
        f"{_WORLDS[plan.adjacency]} ({plan.adjacency}), and the other way round. A record is one row of a silo's "
        "data, or all rows of one owner there where groups are given."
    )


def _drawn(plan: Plan, rate: float) -> str:
    return (
        f"In each of at most {plan.max_attempts:,} attempts every silo draws each record with probability {rate:.4g} "
        f"by a secret coin, clips its gradient to {plan.codec.clip:g}, and adds its share of the noise; sums are "
        f"divided by {plan.divisor:.6g}, whatever was drawn. Every vector that was sent is charged."
    )


def _person(silos: int) -> str:
    if silos == 1:
        return (
            "A person with records in several silos, or with several records in one silo that are not grouped, has a "
            "larger epsilon than is printed: set max_silos and groups where that can be."
        )
    return (
        f"The epsilons hold for a person with one record (or group) in each of up to {silos} silos, for all of them "
        "together."
    )
