"""Carried moments: an optimizer that all clients share takes one client's data into everyone's later updates.

The authors' code makes one Adam before the first round. What it remembers of a client's gradients is neither clipped
nor noised, and moves every later update, of that round and of all others.
"""

from enum import StrEnum

import numpy as np

from d2pfed.learning import Examples, Model, build_model, load_task
from d2pfed.learning.model import Params
from reproduction.as_coded import SharedAdam
from reproduction.errata.finding import Finding
from reproduction.errata.practice import READ
from reproduction.explicit import PAPER_LOCAL

COHORTS = (10, 40)
CLIP = 0.25  # D
_SEED = 1


class Memory(StrEnum):
    """Whose Adam a client trains with."""

    CARRIED = "carried"  # the one that trained the client before
    FRESH = "fresh"  # its own


def others_shift(clients: int, memory: Memory) -> float:
    """Return how far the other clients' clipped updates move, summed, as the first client's data is replaced.

    In units of 2 D, the most that the first client's own clipped update could move: a sound protocol has 0 here,
    since model, data and order of all others are the same in both runs.
    """
    task = load_task("digits", population=100)
    model = build_model("mlp", task, seed=0)
    first = task.clients.examples(0)
    neighbour = Examples(1 - first.inputs, (first.labels + 1) % task.classes)
    rest = [task.clients.examples(client) for client in range(1, clients)]
    here, there = (_sum_of_rest(model, own, rest, memory) for own in (first, neighbour))
    return _norm(here - there) / (2 * CLIP)


def _sum_of_rest(model: Model, first: Examples, rest: list[Examples], memory: Memory) -> Params:
    params, adam = model.initial(), SharedAdam(model, PAPER_LOCAL)
    adam.train(params, first, _SEED, 0)
    total = np.zeros_like(params)
    for number, examples in enumerate(rest, 1):
        used = adam if memory is Memory.CARRIED else SharedAdam(model, PAPER_LOCAL)
        update = used.train(params, examples, _SEED, number)
        total += update * min(1.0, CLIP / _norm(update))
    return total


def _norm(vector: Params) -> float:
    return float(np.sqrt(np.sum(vector.astype(np.float64) ** 2)))


def finding() -> Finding:
    """Return what one client's data does to all others' updates."""
    said = ", ".join(f"{others_shift(clients, Memory.CARRIED):.2f} with {clients} clients" for clients in COHORTS)
    fresh = max(others_shift(clients, Memory.FRESH) for clients in COHORTS)
    return Finding(
        topic="code: carried moments",
        claim="clients train on their own, and what one of them shows is bounded by clip and noise",
        where="Section on the algorithm; " + READ + "src/simulate.py, one optim.Adam before the rounds",
        truth="replace the data of the first client of a round: the sum of all others' clipped updates moves by "
        f"{said}, in units of 2 D, the most that its own update may move (with a fresh Adam for each client: "
        f"{fresh:.0f}). It grows with the cohort, and nothing resets the moments between rounds: a client's data "
        "goes past its clip and its noise, so no epsilon that is computed from one client's clip holds",
        how="two neighbouring data sets, same model, order and other clients: 8 x 8 digits, 5 epochs of Adam, every "
        "update clipped to D = 0.25",
        remedy="a fresh optimizer for every client and round, or only public state",
    )
