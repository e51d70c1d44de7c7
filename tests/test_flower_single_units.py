"""A silo's own units are asked for one at a time: what is no vector counts as zero, and no unit sees another."""

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest

from d2pfed.deploy.client import SingleUnits
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.round import Batch

ROWS = (np.arange(60, dtype=np.float32).reshape(12, 5) - 30) / 7


@dataclass
class Odd:
    """Twelve units, one of which answers with something else."""

    odd: int = -1
    answer: object = None
    asked: list = field(default_factory=list)
    count: int = 12

    def gradients(self, chosen):
        self.asked.append(chosen.tolist())
        if self.odd in chosen:
            return self.answer()
        return iter([ROWS[chosen]])


def vectors(units, chosen=range(12), dimension=5):
    own = SingleUnits(units, dimension)
    return np.concatenate([np.empty((0, dimension), np.float32), *own.gradients(np.array(list(chosen), np.int64))])


def late():
    yield from ()
    raise RuntimeError("in the middle")


def deaf():
    """Leave a log that raises, as a function that closes its streams may."""
    handler = logging.Handler()
    handler.emit = lambda _record: 1 / 0
    logging.getLogger("d2pfed.deploy").addHandler(handler)
    raise RuntimeError("and then it fails")


@pytest.fixture(autouse=True)
def own_handlers():
    log = logging.getLogger("d2pfed.deploy")
    kept = list(log.handlers)
    yield
    log.handlers[:] = kept


NO_VECTOR = {
    "raises": lambda: 1 / 0,
    "breaks the log": deaf,
    "raises later": late,
    "nothing": lambda: iter(()),
    "no iterator": lambda: None,
    "two rows": lambda: iter([ROWS[:2]]),
    "two arrays": lambda: iter([ROWS[:1], ROWS[1:2]]),
    "endless": lambda: iter(lambda: ROWS[:1], None),
    "too short": lambda: iter([ROWS[:1, :4]]),
    "one number": lambda: iter([ROWS[:1, :1]]),
    "flat": lambda: iter([ROWS[0]]),
    "whole numbers": lambda: iter([np.ones((1, 5), np.int64)]),
    "words": lambda: iter([[["a"] * 5]]),
    "complex": lambda: iter([np.ones((1, 5), np.complex64)]),
}


@pytest.mark.parametrize("answer", NO_VECTOR.values(), ids=NO_VECTOR.keys())
def test_what_is_no_vector_counts_as_zero_for_its_unit_alone(answer):
    found = vectors(Odd(4, answer))
    assert not np.isfinite(found[4]).any()  # which a batch counts as zero
    assert np.array_equal(np.delete(found, 4, axis=0), np.delete(ROWS, 4, axis=0))


def test_a_unit_that_interrupts_counts_as_zero_alone():
    def interrupted():
        raise KeyboardInterrupt

    try:
        found = vectors(Odd(4, interrupted))
    except KeyboardInterrupt:
        pytest.fail("one unit has stopped the others")
    assert np.isfinite(found).all(axis=1).sum() == len(ROWS) - 1


def test_a_unit_is_asked_for_by_itself_in_whatever_batch_it_is():
    units = Odd()
    assert np.array_equal(vectors(units, [3, 9, 0]), ROWS[[3, 9, 0]])
    assert units.asked == [[3], [9], [0]]
    assert vectors(units, []).shape == (0, 5)


def test_other_floats_and_memory_that_is_used_again_are_taken_as_they_were():
    room = np.empty((1, 5))

    class Reused(Odd):
        def gradients(self, chosen):
            room[:] = ROWS[chosen]
            yield room

    assert np.array_equal(vectors(Reused()), ROWS)
    assert np.isinf(vectors(Odd(4, lambda: iter([np.full((1, 5), 1e300)])))[4]).all()  # a batch counts it as zero


def test_many_units_come_in_parts_and_their_holder_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr("d2pfed.deploy.client._TOGETHER", 20)
    own = SingleUnits(Odd(4, lambda: 1 / 0), 5)
    assert [len(part) for part in own.gradients(np.repeat(np.arange(12), 2)[:-1])] == [4, 4, 4, 4, 4, 3]
    (told,) = caplog.records
    assert "count as zero" in told.getMessage()
    assert own.count == 12


@pytest.mark.parametrize("tiny", [np.float64(1e-40), np.float32(1e-44)])
def test_a_unit_that_underflows_moves_no_other_where_numpy_raises(tiny):
    """A user's function may set numpy to raise; then one record must not fail its batch."""
    plan = calibrate(
        PrivacyTarget(
            unit="record",
            dimension=5,
            population=5,
            rounds=1,
            records=12,
            batch_rate=1.0,
            epsilon=100.0,
            delta=1e-5,
        )
    )
    huge_and_tiny = lambda: iter([np.array([[3e38, tiny, 0, 0, 0]], np.asarray(tiny).dtype)])  # noqa: E731

    def total(units):
        batch = Batch.draw(plan, bytes(32), units.count, Entropy.replay(b"batch"))
        with np.errstate(all="raise"):
            for rows in SingleUnits(units, 5).gradients(batch.chosen):
                batch.add(rows)
        return batch.total

    moved = total(Odd(7, huge_and_tiny)) - total(Odd(7, lambda: 1 / 0))
    assert 0 < np.linalg.norm(moved.astype(float)) <= plan.codec.grid_radius
