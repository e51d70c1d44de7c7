"""A private statistic over Flower: a run of one round whose clients answer with a vector of numbers, not with training.

The server asks by `private_total`, in its ServerApp. The client's `train` function looks for `STATISTIC` in the
configuration and answers by `statistic_reply`. What travels, what is charged on both sides and what is refused is
that of any round: masked, clipped and noised vectors, the client's own account, the server's ledger.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from d2pfed.accounting import Guarantee
from d2pfed.errors import ConfigError
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.plan import guarantees
from d2pfed.runs import RoundRecord
from d2pfed.runs.plain import from_json, read_text
from d2pfed.statistics.questions import STATISTIC


@dataclass(frozen=True, slots=True)
class PrivateTotal:
    """The noisy sum of the clients' vectors.

    Attributes:
        value: The sum over those who took part.
        standard_error: Of each number, by the noise alone.
        clients: How many took part.
        guarantees: One epsilon per observer.
    """

    value: NDArray[np.float64]
    standard_error: float
    clients: int
    guarantees: tuple[Guarantee, ...] = field(repr=False)


def private_total(
    strategy: PrivateFedAvg,
    grid: Grid,
    name: str,
    size: int,
    *,
    arrays: ArrayRecord | None = None,
    config: ConfigRecord | None = None,
    timeout: float = 3600.0,
) -> PrivateTotal:
    """Ask clients for the vectors of a statistic and return their private sum.

    Args:
        strategy: Plan, directory and roster of this statistic: a plan of one round, for as many parameters as `size`
            and `arrays` have together, and a clip that bounds a client's vector. Its `ledger` may be that of training.
        grid: Flower's grid.
        name: Tells clients which statistic is meant.
        size: How many numbers a client answers with.
        arrays: A model that clients need, for instance to evaluate it.
        config: Further settings for the clients.
        timeout: For how many seconds the server waits for the vectors.
    """
    if strategy.plan.rounds != 1:
        raise ConfigError(f"a statistic takes one round, the plan has {strategy.plan.rounds}")
    if arrays is not None and STATISTIC in arrays:
        raise ConfigError(f"the name {STATISTIC} is reserved")
    asked = ArrayRecord({**(arrays or {}), STATISTIC: Array(np.zeros(size, np.float32))})
    settings = ConfigRecord({**(config or {}), STATISTIC: name})
    found = strategy.start(grid, asked, timeout=timeout, train_config=settings).arrays
    file = strategy.directory / "metrics.jsonl"
    record = from_json(RoundRecord, read_text(file).splitlines()[-1], str(file))
    plan, clients = strategy.plan, record.survivors or 0
    return PrivateTotal(
        value=found[STATISTIC].numpy().astype(np.float64) * plan.divisor,
        standard_error=math.sqrt(plan.noise(clients).sum_variance) * plan.codec.granularity,
        clients=clients,
        guarantees=guarantees(plan),
    )


def statistic_reply(message: Message, vector: NDArray[np.floating]) -> Message:
    """Return a client's answer: the arrays as they came, with its vector in the statistic's place."""
    sent = message.content["arrays"]
    if not isinstance(sent, ArrayRecord) or STATISTIC not in sent:
        raise ConfigError(f"a request for a statistic has an array named {STATISTIC}")
    size = sent[STATISTIC].shape
    if vector.shape != tuple(size):
        raise ConfigError(f"a statistic's vector must have the shape {tuple(size)}, got {vector.shape}")
    arrays = ArrayRecord({**sent, STATISTIC: Array(vector.astype(np.float32))})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)
