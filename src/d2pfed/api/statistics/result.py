"""What a private statistic returns, as a person reads it."""

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Guarantee, round_up
from d2pfed.api.statistics.releasing import Released
from d2pfed.plan import Plan

Array = NDArray[np.float64]
Value = TypeVar("Value")
_HOW = {  # by fidelity; a deployment has another
    "sum": "simulated: vectors added up without the protocol's messages",
    "protocol": "simulated: every message of the protocol was sent",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Statistic(Generic[Value]):
    """A private statistic: its value, its standard error, and what it cost.

    Attributes:
        name: What was computed, in words.
        value: The statistic, right on average but for what the bounds cut off.
        standard_error: Of the value, by the noise alone: a public number, or follows from released ones.
        guarantees: One epsilon per observer.
        bound: The largest L2 norm of what one client, or one record where that is the unit, contributes.
        clients: How many clients there are.
        plan: What clients and server agreed on: noise, quorum, colluders.
        fidelity: Whether every message of secure aggregation was sent in this process (protocol), or the clients'
            encoded vectors were added up (sum).
        spent: Epsilon of all runs on the ledger together; None where there is none.
        warnings: What a user should know before the value is shared.
    """

    name: str
    value: Value
    standard_error: Value
    guarantees: tuple[Guarantee, ...]
    bound: float
    clients: int
    plan: Plan = field(repr=False)
    fidelity: str
    spent: float | None
    warnings: tuple[str, ...]

    @property
    def epsilon(self) -> float:
        """What the whole release is charged, against the plan's observer and the colluders that are planned for."""
        return self.plan.epsilon

    @property
    def delta(self) -> float:
        """The failure probability of that guarantee."""
        return self.plan.delta

    def warned(self, warnings: tuple[str, ...]) -> "Statistic[Value]":
        """Return the same with further warnings."""
        return replace(self, warnings=(*self.warnings, *warnings))

    def __repr__(self) -> str:
        return "\n  ".join([f"{self.name} over {self.clients:,} clients", *self._lines()])

    def _lines(self) -> list[str]:
        plan, missing = self.plan, self.plan.cohort_size - self.plan.quorum
        lines = [*_shown(self.value, self.standard_error)]
        lines.append(
            f"epsilon {round_up(plan.epsilon, 4)} at delta {round_up(plan.delta, 3)} against {plan.against} and up "
            f"to {plan.colluders:,} colluding clients (for one {plan.unit} of norm at most {self.bound:.4g}, "
            f"{plan.adjacency})"
        )
        lines += [
            f"against {each.observer}: {each.reason or round_up(each.epsilon, 4)}" for each in self.guarantees
        ]
        lines.append(f"noise planned for {missing:,} missing clients; {_HOW.get(self.fidelity, self.fidelity)}")
        if self.spent is not None:
            lines.append(
                f"all runs on the ledger: epsilon {round_up(self.spent, 4)} against {plan.against}, if none was begun "
                "or stopped for what another had shown; its budget holds whatever was seen"
            )
        return [*lines, *(f"warning: {each}" for each in self.warnings)]


def statistic(name: str, value: Value, standard_error: Value, released: Released) -> Statistic[Value]:
    """Return the result of a release."""
    return Statistic(
        name=name,
        value=value,
        standard_error=standard_error,
        guarantees=released.guarantees,
        bound=released.bound,
        clients=released.clients,
        plan=released.plan,
        fidelity=released.fidelity,
        spent=released.spent,
        warnings=released.warnings,
    )


def _shown(value: object, error: object) -> list[str]:
    """Return a value with its standard error in a few lines."""
    if isinstance(value, dict) and isinstance(error, dict):
        return [f"{name}: {line}" for name in value for line in _shown(value[name], error[name])]
    found, spread = np.asarray(value), np.asarray(error)
    if found.size > 1:
        text = np.array2string(found, precision=4, suppress_small=True, threshold=20, prefix="  ")
        return [f"{text}, standard error up to {spread.max():.3g}"]
    return [f"{found.item():.6g}, standard error {spread.item():.3g}"]
