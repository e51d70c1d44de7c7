"""Cohorts that can be checked: the tree of seeds, the order of a draw, and what a server could do without them."""

import hashlib
import hmac
import json
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy.stats import chi2

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import draws
from d2pfed.secagg.draws import DrawTree, Opening, draw_key, require_path
from support.rosters import draw_cohort, roster_of

ENTROPY = Entropy.replay(b"a server's draws")
SAMPLINGS = {scheme: CohortSampling(scheme, 23, 5) for scheme in Sampling}


def roster_for(tree, population=23):
    keys = {3 * client + 1: digest("key", client) for client in range(population)}
    return roster_of(keys, depth=tree.depth, root=tree.root)


def cohort(roster, sampling, draw, seed, block=0):
    return draw_cohort(draw_key(roster.digest, draw, seed), roster.clients, sampling, block)


class Second:
    """The definitions once more, in the plainest Python."""

    @staticmethod
    def path(*parts):
        joined = b""
        for part in parts:
            body = part if isinstance(part, bytes) else str(part).encode()
            joined += {bytes: b"b", int: b"i", str: b"s"}[type(part)] + len(body).to_bytes(8, "big") + body
        return joined

    @classmethod
    def digest(cls, *parts):
        return hashlib.sha256(cls.path(*parts)).digest()

    @classmethod
    def seed(cls, key, draw):
        return hmac.digest(key, cls.path("d2pfed draw seed", draw) + b"\x01", "sha256")

    @classmethod
    def node(cls, key, depth, height, place):
        """The node at a place of a height, leaves having height 0."""
        if height == 0:
            return cls.digest("d2pfed draw leaf", place, cls.seed(key, place))
        below = (cls.node(key, depth, height - 1, 2 * place + side) for side in (0, 1))
        return cls.digest("d2pfed draw node", *below)

    @classmethod
    def cohort(cls, roster_digest, clients, sampling, draw, block, seed):
        key = cls.digest("d2pfed draw", roster_digest, draw, seed)
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * len(clients)))
        words = [int.from_bytes(stream[8 * at : 8 * at + 8], "little") for at in range(len(clients))]
        order = sorted(range(len(clients)), key=lambda position: (words[position], position))
        size = sampling.cohort_size
        chosen = {
            Sampling.FIXED: order[:size],
            Sampling.ONCE: order[block * size : block * size + size],
            Sampling.NONE: range(size),
        }[sampling.method]
        return sorted(sorted(clients)[position] for position in chosen)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5, 6])
def test_a_second_implementation_makes_the_same_tree(depth):
    tree = DrawTree(ENTROPY, depth)
    assert tree.depth == depth
    assert tree.root == Second.node(ENTROPY.key, depth, depth, 0)
    for draw in range(1 << depth):
        opening = tree.open(draw)
        assert opening.seed == Second.seed(ENTROPY.key, draw)
        beside = [Second.node(ENTROPY.key, depth, height, (draw >> height) ^ 1) for height in range(depth)]
        assert opening.path == tuple(beside)
        require_path(tree.root, depth, draw, opening)


@pytest.mark.parametrize("scheme", Sampling)
def test_a_second_implementation_draws_the_same_cohorts(scheme):
    tree = DrawTree(ENTROPY, 3)
    roster = roster_for(tree)
    for draw in range(8):
        for block in range(4 if scheme is Sampling.ONCE else 1):
            seed = tree.open(draw).seed
            drawn = cohort(roster, SAMPLINGS[scheme], draw, seed, block)
            assert list(drawn) == Second.cohort(
                roster.digest, roster.clients, SAMPLINGS[scheme], draw, block, seed
            )


def make_vectors():
    tree = DrawTree(ENTROPY, 3)
    clients = [3 * client + 1 for client in range(23)]
    roster_digest = digest("some roster")
    openings = [tree.open(draw) for draw in range(8)]
    return {
        "entropy": ENTROPY.key.hex(),
        "root": tree.root.hex(),
        "openings": [{"seed": each.seed.hex(), "path": [node.hex() for node in each.path]} for each in openings],
        "roster_digest": roster_digest.hex(),
        "clients": clients,
        "cohort": 5,
        "cohorts": {
            scheme.value: [
                draw_cohort(draw_key(roster_digest, 6, openings[6].seed), clients, SAMPLINGS[scheme], block)
                for block in range(4 if scheme is Sampling.ONCE else 1)
            ]
            for scheme in Sampling
        },
    }


def test_known_answers():
    known = json.loads((Path(__file__).parent / "vectors" / "v2" / "draws.json").read_text())
    assert json.loads(json.dumps(make_vectors())) == known


def test_only_the_committed_seed_is_accepted():
    tree = DrawTree(ENTROPY, 4)
    opening = tree.open(5)
    require_path(tree.root, 4, 5, opening)
    wrong = [
        Opening(digest("chosen"), opening.path),
        Opening(opening.seed, (digest("chosen"), *opening.path[1:])),
        Opening(opening.seed, opening.path[::-1]),
        tree.open(6),
    ]
    for other in wrong:
        with pytest.raises(PeerError, match="seed of draw 5"):
            require_path(tree.root, 4, 5, other)
    with pytest.raises(PeerError, match="seed of draw 4"):
        require_path(tree.root, 4, 4, opening)


@pytest.mark.parametrize("draw", [-1, 16, 21])
def test_a_draw_outside_the_tree_is_refused(draw):
    tree = DrawTree(ENTROPY, 4)
    with pytest.raises(PeerError, match=r"in \[0, 16\)"):
        require_path(tree.root, 4, draw, tree.open(5))
    with pytest.raises(ConfigError, match=r"in \[0, 16\)"):
        tree.open(draw)


def test_a_path_of_another_length_is_refused():
    tree = DrawTree(ENTROPY, 4)
    opening = tree.open(5)
    for path in (opening.path[:-1], (*opening.path, bytes(32))):
        with pytest.raises(PeerError, match="a path must have 4 nodes"):
            require_path(tree.root, 4, 5, Opening(opening.seed, path))


def test_with_the_draw_in_the_leaf_one_seed_serves_one_draw(monkeypatch):
    """A server that puts one seed everywhere has one root, but each leaf says which draw it is for."""
    seed = digest("a cohort of its liking")

    def tree_of_one_seed():
        return draws._levels([draws._leaf(draw, seed) for draw in range(4)])

    with monkeypatch.context() as patched:
        patched.setattr(draws, "_leaf", lambda draw, seed: digest("d2pfed draw leaf", 0, seed))
        levels = tree_of_one_seed()
        swapped = Opening(seed, (levels[0][1], levels[1][1]))
        for draw in range(4):
            require_path(levels[2][0], 2, draw, swapped)
    levels = tree_of_one_seed()
    accepted = 0
    for draw in range(4):
        try:
            require_path(levels[2][0], 2, draw, Opening(seed, (levels[0][1], levels[1][1])))
        except PeerError:
            continue
        accepted += 1
    assert accepted == 1


def friends_in_cohort(members, friends):
    return len(set(members) & set(friends))


def test_without_the_path_a_server_names_its_cohort(monkeypatch):
    tree = DrawTree(ENTROPY, 2)
    roster = roster_for(tree)
    sampling, friends = SAMPLINGS[Sampling.FIXED], roster.clients[:10]
    suits = next(
        seed
        for seed in (digest("try", number) for number in range(10_000))
        if friends_in_cohort(cohort(roster, sampling, 0, seed), friends) == 5
    )
    chosen = Opening(suits, tree.open(0).path)
    with pytest.raises(PeerError, match="committed"):
        require_path(tree.root, 2, 0, chosen)
    monkeypatch.setattr(draws, "require_path", lambda *arguments: None)
    draws.require_path(tree.root, 2, 0, chosen)
    assert set(cohort(roster, sampling, 0, suits)) <= set(friends)


def test_a_server_that_knows_the_nonce_tries_trees_until_a_cohort_suits_it():
    """The nonce comes after the root: with it known, draw 0 has all its colluders; drawn later, it is a fair draw."""
    sampling = SAMPLINGS[Sampling.FIXED]
    known = roster_for(DrawTree(ENTROPY, 0))
    friends = known.clients[:10]

    def tried(nonce):
        for number in range(1_000):
            tree = DrawTree(ENTROPY.child(number), 0)
            members = cohort(
                roster_of(known.keys, depth=0, root=tree.root, nonce=nonce), sampling, 0, tree.open(0).seed
            )
            if friends_in_cohort(members, friends) == 5:
                return tree
        raise AssertionError("no tree suits")

    tree = tried(digest("foreseen"))
    later = [
        cohort(
            roster_of(known.keys, depth=0, root=tree.root, nonce=digest("later", trial)),
            sampling,
            0,
            tree.open(0).seed,
        )
        for trial in range(200)
    ]
    full = sum(friends_in_cohort(members, friends) == 5 for members in later)
    assert full <= 8  # expected 1.5 of 200; by chance above 8 once in 10^4 choices of the fixed nonces


@pytest.mark.parametrize("scheme", [Sampling.FIXED, Sampling.ONCE])
def test_cohorts_are_uniform(scheme):
    population, size, trials = 12, 4, 10_000
    sampling, clients = CohortSampling(scheme, population, size), range(population)
    counts = np.zeros(population)
    for trial in range(trials):
        block = trial % 3 if scheme is Sampling.ONCE else 0
        counts[list(draw_cohort(digest("uniform", trial), clients, sampling, block))] += 1
    expected, chance = trials * size / population, size / population
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - chance))
    statistic *= (population - 1) / population  # sizes are fixed: counts are bound by their sum
    assert statistic < chi2.isf(1e-6, population - 1)


def test_the_blocks_of_a_draw_have_no_client_in_common():
    clients, sampling = range(23), SAMPLINGS[Sampling.ONCE]
    blocks = [draw_cohort(bytes(32), clients, sampling, block) for block in range(4)]
    assert len({client for block in blocks for client in block}) == 20
    for block in (4, -1):
        with pytest.raises(PeerError, match=f"no block {block}"):
            draw_cohort(bytes(32), clients, sampling, block)


@pytest.mark.parametrize("scheme", [Sampling.FIXED, Sampling.NONE])
def test_only_a_partition_has_blocks(scheme):
    with pytest.raises(PeerError, match="no block 1"):
        draw_cohort(bytes(32), range(23), SAMPLINGS[scheme], 1)


def test_a_run_cannot_narrow_the_population():
    with pytest.raises(PeerError, match="all 24 enrolled"):
        draw_cohort(bytes(32), range(24), SAMPLINGS[Sampling.FIXED], 0)


@pytest.mark.parametrize("scheme", Sampling)
def test_everyone_is_drawn_where_cohort_and_population_are_one(scheme):
    assert draw_cohort(bytes(32), range(9), CohortSampling(scheme, 9, 9), 0) == tuple(range(9))


def test_the_order_of_the_list_does_not_matter():
    sampling = SAMPLINGS[Sampling.FIXED]
    drawn = {draw_cohort(bytes(32), order, sampling, 0) for order in (range(23), range(22, -1, -1))}
    assert len(drawn) == 1


def test_roster_draw_and_seed_each_change_the_key():
    cases = [
        (bytes(32), 0, bytes(32)),
        (digest(""), 0, bytes(32)),
        (bytes(32), 1, bytes(32)),
        (bytes(32), 0, digest("")),
    ]
    assert len({draw_key(*case) for case in cases}) == 4


def test_an_opening_does_not_print_its_seed():
    assert "seed" not in repr(DrawTree(ENTROPY, 1).open(0))


@pytest.mark.parametrize("depth", [-1, 21])
def test_a_tree_out_of_range_is_refused(depth):
    with pytest.raises(ConfigError, match=f"got {depth}"):
        DrawTree(ENTROPY, depth)


if __name__ == "__main__":
    print(json.dumps(make_vectors(), indent=1))
