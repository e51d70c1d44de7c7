"""The soak in small: its books agree with themselves, and each wrong entry is found."""

from dataclasses import replace

import pytest

from campaign_soak import Books, disagreements, shuffled
from d2pfed.ledger.rows import Key, RowKind
from d2pfed.numerics.randomness import Stream, digest

FIRST, LOST, SECOND, VOID = Key("run", 0, 0), Key("run", 1, 0), Key("run", 1, 1), Key("run", 2, 0)
BOOKS = Books(
    attempts={
        FIRST: (RowKind.COMMIT, (0, 1)),
        LOST: (RowKind.RESERVE, (0, 1)),
        SECOND: (RowKind.COMMIT, (0, 1)),
        VOID: (RowKind.VOID, ()),
    },
    charges={0: frozenset({FIRST, LOST, SECOND}), 1: frozenset({FIRST, SECOND, VOID}), 2: frozenset()},
    rounds=2,
)


def without(key: Key) -> Books:
    """The books of a server that has lost an attempt."""
    return replace(BOOKS, attempts={each: BOOKS.attempts[each] for each in BOOKS.attempts if each != key})


def charged(client: int, *keys: Key) -> Books:
    return replace(BOOKS, charges={**BOOKS.charges, client: frozenset(keys)})


def test_books_agree_where_every_charge_is_known_and_every_sum_is_charged():
    assert disagreements(BOOKS) == []


@pytest.mark.parametrize(
    ("books", "found"),
    [
        (charged(0, LOST, SECOND), "run run, round 1, attempt 0: client 0 is in the sum and has not charged it"),
        (without(LOST), "run run, round 2, attempt 0: charged by client 0, unknown to the server"),
        (charged(2, LOST), "run run, round 2, attempt 0: charged by client 2, which is not in the cohort"),
        (replace(BOOKS, rounds=3), "3 rounds are finished, and only rounds [0, 1] were released"),
    ],
)
def test_a_wrong_entry_is_found(books, found):
    assert disagreements(books) == [found]


def test_a_schedule_has_every_fault_in_an_order_that_the_seed_chooses():
    kinds = [f"kind {number}" for number in range(8)]
    orders = [shuffled(kinds, Stream(digest(seed))) for seed in ("one", "two")]
    assert [sorted(order) for order in orders] == [kinds, kinds]
    assert orders[0] != orders[1]
