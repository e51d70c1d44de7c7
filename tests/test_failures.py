"""A private count of clients whose training failed: one coordinate of the same sum, within the same radius."""

import itertools

import numpy as np
import pytest

from d2pfed import Entropy, Participant, PrivacyTarget, calibrate
from d2pfed.noise.clipping import Extra
from d2pfed.noise.codec import Codec
from d2pfed.numerics import canonical
from d2pfed.numerics.rotation import Hadamard
from d2pfed.plan import decode_plan
from d2pfed.plan.describe import describe_plan
from d2pfed.round import Attempt, rotation_seed, session_of

D, CLIENTS = 12, 20


def target(**changes):
    default = {
        "dimension": D,
        "population": CLIENTS,
        "cohort_size": CLIENTS,
        "rounds": 2,
        "spare": 0,
        "epsilon": 2e3,
    }
    default |= {"delta": 1e-5, "against": "server", "sampling": "none", "clip": 2.0, "dropouts": 0.2}
    return PrivacyTarget(**(default | changes))


def summed(plan, failing, before=0, clip=None):
    """The decoded sum of vectors of length two in one direction, of clients some of which have failed."""
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(CLIENTS)))
    weight = [5.0] if plan.weighting is not None else []
    update = np.append(np.full(D, 2.0 / D**0.5), weight).astype(np.float32)
    total = np.zeros(session.dimension, np.uint32)
    for client in range(CLIENTS):
        own = Participant(plan=plan, client=client, entropy=Entropy.replay(b"failures"), participations=before)
        plan.ring.add_into(total, own.encode(session, update, None, clip, has_failed=client in failing))
    return plan.codec.decode(plan.ring.center(total), rotation_seed(session), 1.0)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        *(({}, changes) for changes in ({}, {"clip": "auto(2.0)"}, {"compression": 8}, {"dimension": D})),
        *(({"max_weight": 10.0}, changes) for changes in ({}, {"compression": 8}, {"dimension": D})),
    ],
)
@pytest.mark.parametrize("failing", [(), (3,), tuple(range(7)), tuple(range(CLIENTS))])
def test_the_sum_tells_how_many_failed(options, changes, failing):
    plan = calibrate(target(**changes), **options, count_failures=True)
    clip = None if plan.adaptive_clip is None else 2.0
    found = summed(plan, failing, clip=clip)[-1] / plan.codec.clip
    assert found == pytest.approx(len(failing), abs=6 * plan.failures_error(CLIENTS) + 0.05)


def test_a_failed_client_sends_the_radius_in_one_coordinate_and_nothing_else():
    plan = calibrate(target(), count_failures=True)
    found = summed(plan, tuple(range(CLIENTS)))
    assert np.abs(found[:-1]).max() < 8 * plan.sigma + 0.1
    assert np.abs(summed(plan, ())[:-1]).max() > 5


def test_a_client_at_its_cap_does_not_tell_that_it_has_failed():
    plan = calibrate(target(), count_failures=True)
    found = summed(plan, tuple(range(CLIENTS)), before=plan.max_participations)
    assert abs(found[-1]) / plan.codec.clip < 8 * plan.failures_error(CLIENTS)


def test_vector_and_indicator_are_as_sensitive_as_the_vector():
    """All pairs of one dimension and its indicator, as the codec sends them; the twin keeps the update."""
    codec = Codec(rotation=Hadamard(2), clip=1.0, granularity=0.01)

    def farthest(vectors):
        sent = [codec.prepare(np.array(each, np.float32), bytes(32), None) for each in vectors]
        assert all(np.dot(each.values, each.values) <= each.radius**2 for each in sent)
        pairs = itertools.combinations([each.values / each.radius for each in sent], 2)
        return max(np.linalg.norm(one - other) for one, other in pairs)

    succeeded, failed = [(x, 0.0) for x in np.linspace(-1, 1, 9)], [(0.0, 1.0)]
    assert farthest(succeeded + failed) <= 2 + 1e-9
    assert farthest(succeeded[:1] + failed) == pytest.approx(2**0.5, rel=0.01)
    # Beside an update, or after the check of the norm, the indicator would need a larger radius.
    both = [np.array([x, f]) for x in np.linspace(-1, 1, 9) for f in (0.0, 1.0)]
    assert max(np.linalg.norm(one - other) for one, other in itertools.combinations(both, 2)) > 2.2


def test_it_costs_a_coordinate_and_no_noise():
    plain, counting = calibrate(target()), calibrate(target(), count_failures=True)
    assert (counting.dimension, counting.codec.rotation.dimension) == (D, D + 1)
    assert counting.extras == (Extra.FAILURES,)
    assert counting.codec.clip == plain.codec.clip
    assert counting.sigma == pytest.approx(plain.sigma, rel=1e-3)
    assert plain.ring.bits <= counting.ring.bits <= plain.ring.bits + 1
    assert decode_plan(canonical.encode(counting)) == counting
    assert counting.digest != plain.digest
    assert "counts_failures" not in canonical.encode(plain)
    assert describe_plan(counting).guarantees
    weighted = calibrate(target(), 10.0, count_failures=True)
    assert weighted.extras == (Extra.WEIGHTS, Extra.FAILURES)
    assert weighted.dimension == D


def record_sum(plan, rows):
    """The exact integers of a silo's batch of these rows, before its noise."""
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(CLIENTS)))
    own = Participant(plan=plan, client=0, entropy=Entropy.replay(b"records"), participations=0)
    batch = own.batch(session, len(rows))
    batch.add(np.array(rows, np.float32)[batch.chosen])
    return batch.total, rotation_seed(session)


def records(**changes):
    return calibrate(
        target(unit="record", records=4000, batch_rate=1.0, clip=1.0, colluders=0.1, **changes),
        count_failures=True,
    )


@pytest.mark.parametrize("changes", [{}, {"compression": 8}])
def test_a_record_tells_by_itself_alone_that_it_has_failed(changes):
    plan = records(**changes)
    good, failed = np.full(D, 0.2), np.full(D, np.nan)
    mixed, alone = (record_sum(plan, rows)[0] for rows in ([good, failed, good], [failed]))
    np.testing.assert_array_equal(mixed, record_sum(plan, [good, good])[0] + alone)
    half = good.copy()
    half[3] = np.inf
    np.testing.assert_array_equal(alone, record_sum(plan, [half])[0])  # nothing else of it is told
    radius = plan.codec.clip / plan.codec.granularity * 2**plan.codec.fraction_bits
    assert radius * 0.99 < np.linalg.norm(alone) <= radius


def test_the_sum_of_records_tells_how_many_failed():
    plan = records()
    rows = [np.full(D, 0.2)] * 30 + [np.full(D, np.nan)] * 12
    total, seed = record_sum(plan, rows)
    found = plan.codec.decode((total >> plan.codec.fraction_bits).astype(np.int64), seed, 1.0)
    assert found[-1] / plan.codec.clip == pytest.approx(12, abs=0.2)
    assert found[:D] == pytest.approx(np.full(D, 6.0), abs=0.2)
