"""Cohorts that the server cannot choose: a tree of seeds, committed to before the authority's nonce exists.

The server commits to the root of a hash tree over 2^depth secret seeds. The authority draws a nonce afterwards and
signs a roster with both. Draw j is then fixed by seed j and the roster: a client that sees the seed and its path to the
root computes the cohort itself, and nobody can foresee it without the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.secagg.wire import ClientId

MOST_DEPTH = 20
SEED_BYTES = 32
NODE_BYTES = 32

_leaf = partial(digest, "d2pfed draw leaf")  # of a draw and its seed
_node = partial(digest, "d2pfed draw node")  # of the two nodes below


@dataclass(frozen=True, slots=True)
class Opening:
    """The seed of one draw and the nodes beside its way up to the root, the lowest first."""

    seed: bytes = field(repr=False)  # for the members of its cohort only
    path: tuple[bytes, ...]


class DrawTree:
    """The server's tree of seeds, which it commits to by the root; its entropy gives every cohort in advance.

    It holds the upper half of its levels only, and makes the seeds below one of those nodes again for each opening.
    """

    def __init__(self, entropy: Entropy, depth: int) -> None:
        if not 0 <= depth <= MOST_DEPTH:
            raise ConfigError(f"a tree of draws has a depth in [0, {MOST_DEPTH}], got {depth}")
        self._entropy = entropy
        self._low = depth // 2
        self._levels = _levels([self._twig(place)[-1][0] for place in range(1 << depth - self._low)])
        self.depth, self.root = depth, self._levels[-1][0]

    def open(self, draw: int) -> Opening:
        """Return the seed of a draw and its path."""
        if not 0 <= draw < 1 << self.depth:
            raise ConfigError(f"a draw must be in [0, {1 << self.depth}), got {draw}")
        levels = *self._twig(draw >> self._low)[:-1], *self._levels[:-1]
        path = (nodes[(draw >> height ^ 1) % len(nodes)] for height, nodes in enumerate(levels))
        return Opening(self._seed(draw), tuple(path))

    def _twig(self, place: int) -> list[list[bytes]]:
        """Return the levels of the lower tree at one place, its leaves first."""
        first = place << self._low
        return _levels([_leaf(draw, self._seed(draw)) for draw in range(first, first + (1 << self._low))])

    def _seed(self, draw: int) -> bytes:
        return self._entropy.child("d2pfed draw seed", draw).key


def require_path(root: bytes, depth: int, draw: int, opening: Opening) -> None:
    """Refuse a seed that is not the one committed to for this draw.

    Guarantee: one seed at most is accepted for a root and a draw, since SHA-256 has no known collisions.
    Checked: test_draws.py::test_only_the_committed_seed_is_accepted.
    """
    if not 0 <= draw < 1 << depth:
        raise PeerError(f"a draw must be in [0, {1 << depth}), got {draw}")
    if len(opening.path) != depth:
        raise PeerError(f"a path must have {depth} nodes, got {len(opening.path)}")
    node, place = _leaf(draw, opening.seed), draw
    for beside in opening.path:
        node = _node(beside, node) if place % 2 else _node(node, beside)
        place //= 2
    if node != root:
        raise PeerError(f"the seed of draw {draw} is not the one that the server has committed to")


def draw_key(roster_digest: bytes, draw: int, seed: bytes) -> bytes:
    """Return the key of a draw: nothing in it is left to choose once the roster is signed."""
    return digest("d2pfed draw", roster_digest, draw, seed)


def draw_order(
    key: bytes, clients: Sequence[ClientId], sampling: CohortSampling, block: int
) -> tuple[ClientId, ...]:
    """Return the cohort of a draw among all enrolled clients, in the order in which it was drawn; else by identity.

    `block` is a part of the draw under `once`.

    Guarantee: cohort and order are uniform, and fixed before the nonce in the roster was drawn; see `draw_key` and
    `require_path`. Checked: test_draws.py::test_cohorts_are_uniform.
    """
    population, size = sampling.population, sampling.cohort_size
    if len(clients) != population:
        raise PeerError(
            f"a cohort is drawn from all {len(clients)} enrolled clients, got a population of {population}"
        )
    if not 0 <= block * size <= (population - size if sampling.method is Sampling.ONCE else 0):
        raise PeerError(f"there is no block {block} of {size} clients among {population}")
    if sampling.method is Sampling.NONE:
        places = np.arange(size)
    else:
        order = np.argsort(Stream(key).words(population), kind="stable")  # equal words by place
        places = order[block * size : (block + 1) * size]
    ordered = sorted(clients)
    return tuple(ordered[place] for place in places.tolist())


def _levels(leaves: list[bytes]) -> list[list[bytes]]:
    """Return all levels of a tree from its leaves to its root."""
    levels = [leaves]
    while len(levels[-1]) > 1:
        below = iter(levels[-1])
        levels.append([_node(left, right) for left, right in zip(below, below, strict=True)])
    return levels
