"""What a dropout does to shared noise: fatal with the shares as published, harmless or void here."""

from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import chi2

from campaign_secagg import Cell, loss_of
from d2pfed.errors import TooFewClients
from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import Delivery
from support.evil import Evil
from support.federation import Federation, make_session, run_round
from support.stats import check_fits

DIMENSION = 20_000
SIGMA = Fraction(12)


def gaussian_pmf(values):
    weights = np.exp(-(np.arange(-400, 401) ** 2) / (2 * float(SIGMA) ** 2))
    return np.exp(-(values**2) / (2 * float(SIGMA) ** 2)) / weights.sum()


def levels(client, count):
    """A client's quantised update: most coordinates near the middle of 21 levels, as after a rotation."""
    coins = np.frombuffer(Stream(digest("levels", client)).bytes(count), np.uint8)
    return 10 + np.bitwise_count(coins & 3).astype(np.int64) - 1


def dropout_attack(total, clients, survivors, guess):
    """Read the noise out of a sum in which each survivor has added an n-th of it (a server's arithmetic)."""
    residue = total * pow(survivors, -1, clients) % clients  # the levels vanish modulo the number of clients
    near = (total - clients * guess) / survivors
    return residue + clients * np.round((near - residue) / clients).astype(np.int64)


def test_with_the_published_shares_one_dropout_reveals_the_noise():
    clients, survivors, count = 100, 99, 5000
    noise = DiscreteGaussian(Fraction(272)).draw(count, Stream(digest("noise")))
    # Each sends clients * level + noise, which is its level plus its n-th of the noise in units of 1/n.
    total = sum(clients * levels(client, count) + noise for client in range(survivors))
    recovered = dropout_attack(total, clients, survivors, guess=10 * survivors)
    assert np.mean(recovered == noise) > 0.999


def shares_of_group_noise(session, vectors=None):
    """Everyone adds an integer share of one noise vector that all derive from the group seed."""
    size = len(session.cohort)

    def contribution(client):
        def contribute(task, model, group_seed):
            noise = DiscreteGaussian(SIGMA).draw(session.dimension, Stream(digest("noise", group_seed)))
            share = (noise + session.rank(client)) // size
            return session.ring.wrap(levels(client, session.dimension) + share)

        return contribute

    return contribution


def noise_in_the_sum(session, contribution, dropped=frozenset()):
    federation = Federation(session)
    federation.contribution = contribution
    federation.__post_init__()
    cell = Cell("mask", "one", "after", session.delivery)
    total, survivors = run_round(federation, loss_of(cell, set(dropped)))
    plain = sum(levels(client, session.dimension) for client in survivors)
    return session.ring.center(total.vector) - plain


def test_the_noise_shared_by_everyone_is_the_discrete_gaussian():
    session = make_session(7, delivery=Delivery.EVERYONE, quorum=7, dimension=DIMENSION, bits=12)
    check_fits(noise_in_the_sum(session, shares_of_group_noise(session)), gaussian_pmf, false_alarm=1e-6)


def test_with_one_share_missing_there_is_no_sum_to_attack():
    session = make_session(7, delivery=Delivery.EVERYONE, quorum=7, dimension=DIMENSION, bits=12)
    with pytest.raises(TooFewClients):
        noise_in_the_sum(session, shares_of_group_noise(session), {session.cohort[3]})


def test_a_missing_share_would_be_seen_by_the_check():
    session = make_session(7, delivery=Delivery.QUORUM, quorum=6, dimension=DIMENSION, bits=12)
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(
            noise_in_the_sum(session, fixed_group(session), {session.cohort[3]}), gaussian_pmf, false_alarm=1e-6
        )


def fixed_group(session):
    """The same shares without a session that insists on everyone."""
    contribution = shares_of_group_noise(session)
    return lambda client: lambda task, model, group_seed: contribution(client)(task, model, b"a seed")


def uniformity(values, modulus):
    counts = np.bincount(values, minlength=modulus)
    expected = values.size / modulus
    return float(((counts - expected) ** 2 / expected).sum())


def sum_with_another_model_for_the_victim(model_of_victim):
    """A server that does not mind adds up vectors masked for different models."""
    session = make_session(6, dimension=DIMENSION)
    evil = Evil(session, ())
    everyone = evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    evil.mask(evil.everyone, everyone, model=lambda rank: b"dead" if rank else model_of_victim)
    evil.open(evil.everyone, everyone, everyone)
    total = np.zeros(DIMENSION, np.uint32)
    for rank in evil.everyone:
        session.ring.add_into(total, evil.vectors[rank])
    return evil, everyone, total


def test_a_client_with_another_model_than_its_peers_adds_only_noise(monkeypatch):
    evil, everyone, _ = sum_with_another_model_for_the_victim(b"alive")
    monkeypatch.setattr("support.evil.MODEL", b"dead")
    unmasked = evil.sum_of(everyone, everyone)
    assert uniformity(unmasked, 256) < chi2.isf(1e-6, 255)
    right = evil.without(unmasked, range(1, 6))
    assert np.mean(right == evil.victims_update) < 0.02


def test_masked_vectors_are_uniform_even_of_constant_updates():
    session = make_session(4, dimension=DIMENSION)
    vectors = {client: np.zeros(DIMENSION, np.uint32) for client in session.cohort}
    evil = Evil(session, ())
    evil.federation.vectors = vectors
    evil.until_masked()
    for rank in evil.everyone:
        assert uniformity(evil.vectors[rank], 256) < chi2.isf(1e-6, 255)
    assert uniformity(vectors[session.cohort[0]], 256) > chi2.isf(1e-6, 255)
