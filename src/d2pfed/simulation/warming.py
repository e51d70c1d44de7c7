"""Compiling before the first round: what trains in this process and, at the same time, what encodes in another."""

import os

import numpy as np

from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.compiled import is_kept
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.rotation import rotate
from d2pfed.plan import Plan
from d2pfed.round import sketch_of
from d2pfed.secagg import Delivery
from d2pfed.simulation.backend import TrainClients, finite, simulated_participant
from d2pfed.simulation.process_backend import can_fork


def warm_up(plan: Plan, local_training: TrainClients, params: FloatVector) -> None:
    """Train and encode one client for nothing: workers that are forked later find all kernels compiled.

    In the first command after an installation a copy of this process compiles what encodes, and leaves it on the disk,
    while this one compiles what trains.
    """
    helper = None if is_kept(rotate) or not can_fork() else _compile_apart(plan, params)
    update = finite(next(iter(local_training(params, (0,), 0))))
    if helper is not None:
        os.waitpid(helper, 0)
    _encode(plan, update)


def _compile_apart(plan: Plan, params: FloatVector) -> int:
    """Encode in a copy of this process, and return its number; whatever it fails at, this process does itself."""
    if process := os.fork():
        return process
    try:
        _encode(plan, np.zeros_like(params))
    finally:
        os._exit(0)  # nothing of what this process would do at its end


def _encode(plan: Plan, update: FloatVector) -> None:
    """Encode one update, pack it and read it again."""
    session, entropy = sketch_of(plan), Entropy.system()
    group = entropy.key if session.delivery is Delivery.EVERYONE else None
    clip = None if plan.adaptive_clip is None else plan.adaptive_clip.initial
    encoded = simulated_participant(plan, 0, entropy, {}).encode(session, update, group, clip)
    session.ring.unpack(session.ring.pack(encoded), session.dimension)
