"""What a client sends and receives by cohort and epsilon, with compression and without; counted from plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from d2pfed.numerics.model_bytes import SHORT_BITS
from d2pfed.plan import DEFAULT_TARGET, calibrate, describe
from d2pfed.secagg.trust import Consistency

CLIENTS, EPSILONS, COMPRESSIONS = (100, 1000, 10_000), (1.0, 2.0, 4.0, 8.0), ("off", "auto", "2048")
DIMENSION = 19_354  # of the default job
_ROUNDS, _POPULATION = 50, 100  # the population in cohorts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Bytes of an ordinary client in one attempt of a signed plan."""

    clients: int
    epsilon: float
    compression: str  # as it was asked for
    coordinates: int
    bits: int
    vector: int
    sent: int | None  # in all; None where no protocol carries the plan
    received: int | None  # in all, the roster not included
    floats: int  # what federated averaging sends, and receives


def bench_traffic(
    clients: Sequence[int] = CLIENTS, epsilons: Sequence[float] = EPSILONS, dimension: int = DIMENSION
) -> Iterator[TrafficRow]:
    """Yield a row for each size of a cohort, epsilon and compression."""
    for count in clients:
        for epsilon in epsilons:
            for compression in COMPRESSIONS:
                target = replace(
                    DEFAULT_TARGET,
                    dimension=dimension,
                    population=_POPULATION * count,
                    cohort_size=count,
                    rounds=_ROUNDS,
                    epsilon=epsilon,
                    consistency=Consistency.SIGNED,
                    download_bits=SHORT_BITS,  # as deployments have it
                    compression=int(compression) if compression.isdigit() else compression,
                )
                plan = calibrate(target)
                found = describe(target, plan)
                yield TrafficRow(
                    clients=count,
                    epsilon=epsilon,
                    compression=compression,
                    coordinates=plan.codec.length,
                    bits=found.bits,
                    vector=found.upload_bytes,
                    sent=None if found.traffic is None else found.traffic.client.sent,
                    received=None if found.traffic is None else found.traffic.client.received,
                    floats=4 * dimension,
                )
