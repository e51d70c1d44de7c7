"""A whole client's encoding as a piece of work to be timed: clip, rotate, draw, wrap, pack."""

import tracemalloc
from collections.abc import Callable

import numpy as np

from benchmarks.explicit import privacy_target
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import calibrate
from d2pfed.round import Attempt, Participant, session_of


def prepare_encode(dimension: int) -> Callable[[], bytes]:
    """Return a function that encodes one client's update for 100 rounds of 100 out of 100,000 clients."""
    plan = calibrate(privacy_target(dimension=dimension, population=100_000, cohort_size=100, rounds=100))
    session = session_of(plan, Attempt("bench", 0, 0), tuple(range(100)))
    participant = Participant(plan=plan, client=0, entropy=Entropy.replay(b"bench encode"), participations=0)
    update = np.sin(np.arange(dimension, dtype=np.float32))

    def encode() -> bytes:
        return plan.ring.pack(participant.encode(session, update, None))

    return encode


def encode_memory(dimension: int) -> float:
    """Return the peak memory of an encoding, in sizes of the update as float32."""
    encode = prepare_encode(dimension)
    encode()
    tracemalloc.start()
    encode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (4 * dimension)
