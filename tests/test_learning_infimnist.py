"""Digits on demand follow the index rules, digit by digit."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter, shift

from d2pfed.errors import ConfigError
from d2pfed.learning import Partition, PartitionKind, infimnist
from d2pfed.learning.infimnist import VirtualClients, deform, digit_examples, digit_gradients, fields, recipe

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits

MOVES = ["up", "down", "left", "right", "up left", "up right", "down left", "down right", "none"]
BASE = np.random.default_rng(3).integers(0, 256, (40, 28, 28), dtype=np.uint8)
LABELS = np.arange(40) % 10


def literal_rule(i: int, count: int) -> tuple[int, int, int, int, str]:
    """The rules as they are written down, in Python integers."""
    base = (i - 10_000) % count
    k1 = ((i % 2**32) * 131_071 % 2**32) % 1521
    k2 = (k1 + 1 + 2 * i) % 1522
    return base, k1, k2, 1 if (i // count) % 2 == 0 else -1, MOVES[k1 % 9]


def literal_digit(i: int, base: np.ndarray, sign_of_second: int = -1) -> np.ndarray:
    at, k1, k2, sign, move = literal_rule(i, len(base))
    digit = base[at].astype(np.float64)
    across = gaussian_filter(digit, 0.9, order=(0, 1), mode="constant")
    down = gaussian_filter(digit, 0.9, order=(1, 0), mode="constant")
    changed = np.clip(digit + sign * (fields()[k1] * across + sign_of_second * fields()[k2] * down), 0, 255)
    vertical = {"up": -1, "down": 1}.get(move.split()[0], 0)
    horizontal = {"left": -1, "right": 1}.get(move.split()[-1], 0)
    return shift(changed, (vertical, horizontal), order=0, prefilter=False)


def made(index: np.ndarray) -> np.ndarray:
    return deform(BASE, digit_gradients(BASE), recipe(index, len(BASE)), fields(), np.float32(1))


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 60_000), i=st.integers(0, 2**40))
def test_recipes_follow_the_literal_rules(count, i):
    assume(i >= 10_000 + count)
    *numbers, move = recipe(np.array([i]), count)[0].tolist()
    assert (*numbers, MOVES[move]) == literal_rule(i, count)


def test_sixty_thousand_base_digits_give_the_published_rule():
    found = recipe(np.array([70_000, 130_000]), 60_000)
    assert found[:, 0].tolist() == [0, 0]
    assert found[:, 3].tolist() == [-1, 1]
    assert found[0, 1] == (70_000 * 131_071 % 2**32) % 1521


def test_digits_below_the_deformed_ones_have_no_recipe():
    with pytest.raises(ConfigError, match="at least 70000"):
        recipe(np.array([69_999]), 60_000)
    assert len(recipe(np.array([], np.int64), 60_000)) == 0


def test_digits_are_those_of_a_slow_literal_twin_under_every_move():
    index = 10_040 + np.arange(60) * 7
    assert set(recipe(index, len(BASE))[:, 4]) == set(range(9))
    wanted = np.stack([literal_digit(int(i), BASE) for i in index])
    np.testing.assert_allclose(made(index), wanted, atol=1e-3)


def test_the_twin_notices_a_wrong_sign():
    index = 10_040 + np.arange(5)
    wrong = np.stack([literal_digit(int(i), BASE, sign_of_second=1) for i in index])
    assert np.abs(made(index) - wrong).max() > 1


def test_fields_are_smooth_with_unit_deviation():
    made = fields()
    assert made.shape == (1522, 28, 28)
    np.testing.assert_allclose(made.std(axis=(1, 2)), 1, rtol=1e-5)
    assert [np.mean(np.square(np.diff(made, axis=axis))) < 0.1 for axis in (1, 2)] == [True, True]  # white: 2


def clients(**changed) -> VirtualClients:
    settings_ = {
        "base": BASE,
        "labels": LABELS,
        "population": 1000,
        "size": 30,
        "partition": Partition(PartitionKind.IID),
        "seed": 1,
    }
    return VirtualClients(**(settings_ | changed))


def test_a_client_holds_its_own_digits_the_same_at_every_call():
    first, again, neighbour = (clients().examples(client) for client in (5, 5, 6))
    torch.testing.assert_close(first.inputs, again.inputs, rtol=0, atol=0)
    assert not torch.equal(first.inputs, neighbour.inputs)
    assert first.inputs.shape == (30, 1, 28, 28)


def test_no_two_digits_of_a_population_are_alike_even_from_one_base_digit():
    lonely = clients(base=BASE[:1], labels=LABELS[:1], population=4)
    digits = torch.cat([lonely.examples(client).inputs for client in range(4)])
    assert len(torch.unique(digits.flatten(1), dim=0)) == len(digits)


def test_a_digit_keeps_the_label_of_its_base_digit():
    plain = np.zeros((10, 28, 28), np.uint8)
    plain[np.arange(10), 14, 14] = 20 * np.arange(1, 11)
    held = clients(base=plain, labels=np.arange(10)).examples(7)
    tallest = held.inputs.flatten(1).amax(1)
    assert np.corrcoef(tallest.numpy(), held.labels.numpy())[0, 1] > 0.9


def test_shards_on_demand_hold_one_class_and_cover_all():
    sharded = clients(partition=Partition(PartitionKind.SHARDS), population=10)
    held = [set(sharded.examples(client).labels.tolist()) for client in range(10)]
    assert held == [{label} for label in range(10)]


def test_dirichlet_on_demand_is_uneven_and_iid_is_not():
    def largest_share(partition):
        held = [clients(partition=partition).examples(client).labels.bincount().max() for client in range(20)]
        return float(torch.stack(held).float().mean()) / 30

    assert (
        largest_share(Partition(PartitionKind.DIRICHLET, 0.1))
        > 0.5
        > 0.35
        > largest_share(Partition(PartitionKind.IID))
    )


def test_empty_paper_is_zero_and_full_ink_is_one():
    examples = digit_examples(np.array([[[0, 255]]], np.uint8), np.array([3]))
    torch.testing.assert_close(examples.inputs.flatten(), torch.tensor([0.0, 1.0]))
    made = clients().examples(0).inputs
    assert 0 <= made.min() < 0.01 < 0.99 < made.max() <= 1


@pytest.mark.parametrize("wrong", [{"population": 0}, {"size": 0}, {"labels": LABELS[:3]}, {"labels": LABELS[:0]}])
def test_impossible_populations_are_refused(wrong):
    with pytest.raises(ConfigError):
        clients(**wrong)


@pytest.mark.parametrize("client", [-1, 1000])
def test_clients_outside_the_population_are_refused(client):
    with pytest.raises(ConfigError, match="client must be in"):
        clients().examples(client)


def test_gradients_of_base_digits_are_those_of_scipy():
    found, digits = digit_gradients(BASE), BASE.astype(np.float64)
    for at, order in enumerate([(0, 0, 1), (0, 1, 0)]):
        wanted = np.stack([gaussian_filter(digit, 0.9, order=order[1:], mode="constant") for digit in digits])
        np.testing.assert_allclose(found[:, at], wanted, atol=1e-3)
        assert np.abs(found[:, 1 - at] - wanted).max() > 1


def test_digits_are_the_same_bits_whether_or_not_gradients_are_kept(monkeypatch):
    kept = clients().examples(5)
    monkeypatch.setattr(infimnist, "_MOST_CACHED_PIXELS", 0)
    unkept = clients()
    made = unkept.examples(5)
    assert torch.equal(kept.inputs, made.inputs)
    assert torch.equal(kept.labels, made.labels)
    assert "_gradients" not in unkept.__dict__


def test_pickled_clients_hold_base_digits_and_not_their_gradients():
    own = clients()
    before = len(pickle.dumps(own))
    wanted = own.examples(3)
    assert "_gradients" in own.__dict__
    content = pickle.dumps(own)
    assert len(content) == before
    assert torch.equal(pickle.loads(content).examples(3).inputs, wanted.inputs)
