"""A partition gives every example to exactly one client."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from d2pfed.errors import ConfigError
from d2pfed.learning import Partition, PartitionKind, parse_partition
from d2pfed.learning.task import rows_by_owner

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(np.array)
DEALT = st.sampled_from(
    [
        Partition(PartitionKind.IID),
        Partition(PartitionKind.SHARDS),
        Partition(PartitionKind.DIRICHLET, 0.01),
        Partition(PartitionKind.DIRICHLET, 0.5),
        Partition(PartitionKind.DIRICHLET, 100.0),
    ]
)


def is_partition(rows: tuple[np.ndarray, ...], count: int) -> bool:
    return np.array_equal(np.sort(np.concatenate(rows)), np.arange(count))


@settings(max_examples=100, deadline=None)
@given(labels=LABELS, partition=DEALT, population=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_every_row_goes_to_one_client_and_sizes_are_even(labels, partition, population, seed):
    assume(population <= len(labels))
    rows = partition.split(labels, population, np.random.default_rng(seed))
    assert len(rows) == population
    assert is_partition(rows, len(labels))
    assert np.ptp([len(own) for own in rows]) <= 1


def test_the_check_of_partitions_rejects_a_row_given_twice():
    assert not is_partition((np.array([0, 1]), np.array([1])), 3)
    assert not is_partition((np.array([0, 1]), np.array([1])), 2)


@settings(max_examples=50, deadline=None)
@given(owners=LABELS)
def test_each_owner_is_one_client_with_its_own_rows(owners):
    rows = rows_by_owner(owners)
    assert is_partition(rows, len(owners))
    assert [set(owners[own]) for own in rows] == [{owner} for owner in np.unique(owners)]


@settings(max_examples=50, deadline=None)
@given(labels=LABELS, share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_shards_are_contiguous_in_the_order_of_classes(labels, share, seed):
    population = max(1, round(share * len(labels)))
    rows = Partition(PartitionKind.SHARDS).split(labels, population, np.random.default_rng(seed))
    np.testing.assert_array_equal(labels[np.concatenate(rows)], np.sort(labels))


@settings(max_examples=100, deadline=None)
@given(
    partition=DEALT,
    share=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(np.array),
    population=st.integers(1, 20),
    size=st.integers(1, 30),
    seed=st.integers(0, 2**32),
)
def test_counts_on_demand_add_up_and_avoid_absent_classes(partition, share, population, size, seed):
    assume(share.sum())
    for client in range(population):
        counts = partition.counts(client, population, share, size, seed)
        assert counts.sum() == size
        assert (counts >= 0).all()
        assert not counts[share == 0].any()
        np.testing.assert_array_equal(counts, partition.counts(client, population, share, size, seed))


@settings(max_examples=50, deadline=None)
@given(share=st.lists(st.integers(0, 9), min_size=1, max_size=6).map(np.array), population=st.integers(1, 20))
def test_shards_on_demand_are_those_of_a_sorted_table(share, population):
    assume(share.sum())
    size = int(share.sum())
    table = np.repeat(np.arange(len(share)), share * population)
    for client in range(population):
        own = table[client * size : (client + 1) * size]
        counts = Partition(PartitionKind.SHARDS).counts(client, population, share, size, seed=0)
        np.testing.assert_array_equal(counts, np.bincount(own, minlength=len(share)))


def unevenness(rows: tuple[np.ndarray, ...], labels: np.ndarray) -> float:
    return float(np.mean([np.bincount(labels[own]).max() / len(own) for own in rows]))


def test_unevenness_falls_from_shards_over_dirichlet_to_iid():
    labels = np.arange(4000) % 10
    measured = [
        unevenness(partition.split(labels, 100, np.random.default_rng(1)), labels)
        for partition in (
            Partition(PartitionKind.SHARDS),
            Partition(PartitionKind.DIRICHLET, 0.1),
            Partition(PartitionKind.DIRICHLET, 1.0),
            Partition(PartitionKind.IID),
        )
    ]
    assert measured[0] == 1
    assert measured[0] > measured[1] + 0.2 > measured[2] + 0.4 > measured[3] + 0.5


@pytest.mark.parametrize(
    "partition",
    [Partition(PartitionKind.IID), Partition(PartitionKind.SHARDS), Partition(PartitionKind.DIRICHLET, 0.5)],
)
@pytest.mark.parametrize("population", [0, 4])
def test_a_client_without_an_example_is_refused(partition, population):
    with pytest.raises(ConfigError, match=r"population must be in \[1, 3\]"):
        partition.split(np.array([0, 1, 2]), population, np.random.default_rng(0))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_concentration_is_refused(alpha):
    with pytest.raises(ConfigError, match="alpha"):
        Partition(PartitionKind.DIRICHLET, alpha)


def test_partitions_are_read_from_text():
    texts = ["iid", "shards", "owner", "dirichlet:0.25"]
    assert [parse_partition(text) for text in texts] == [
        Partition(PartitionKind.IID),
        Partition(PartitionKind.SHARDS),
        Partition(PartitionKind.OWNER),
        Partition(PartitionKind.DIRICHLET, 0.25),
    ]


@pytest.mark.parametrize("text", ["", "iid:1", "dirichlet", "dirichlet:x", "dirichlet:-1", "writers"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError):
        parse_partition(text)
