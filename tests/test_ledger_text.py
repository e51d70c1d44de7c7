import base64
import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d2pfed.accounting import RELEASED, SERVER, colluding
from d2pfed.accounting.events import RATE_STEPS, Adjacency, BatchSampling, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, SkellamSum
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger import Budget, Head, Key, RowKind, decode_release, encode_release
from d2pfed.ledger.budget import decode_body
from d2pfed.ledger.rows import _unpack, chained_row
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from support.adjacencies import OF_CLIENTS

whole = st.integers(1, 2**70)
ratios = st.builds(Fraction, whole, whole)
floats = st.floats(min_value=5e-324, allow_infinity=False)
noises = st.one_of(
    st.builds(DiscreteGaussianSum, ratios, whole, ratios, whole),
    st.builds(SkellamSum, ratios, whole, ratios, ratios, whole),
    st.builds(BinomialSum, whole, whole, ratios, ratios, ratios, whole),
    st.builds(ContinuousGaussian, floats, floats),
)
identities = st.one_of(st.integers(0, 300), st.integers(0, 2**64))
samplings = st.builds(
    lambda s, a, b: CohortSampling(s, a + b, b), st.sampled_from(Sampling), st.integers(0, 9), whole
)
rates = st.integers(1, RATE_STEPS).map(lambda part: Fraction(part, RATE_STEPS))


def rows_of(unit, adjacency, sampling, batches):
    """Releases of one unit, each with what goes with it."""
    return st.builds(
        Release,
        run=st.text(min_size=1, max_size=3),
        round=st.integers(0, 2**40),
        attempt=st.integers(0, 9),
        unit=st.just(unit),
        adjacency=st.sampled_from(adjacency),
        sampling=sampling,
        noise=noises,
        participants=st.sets(identities, max_size=20).map(lambda ids: tuple(sorted(ids))),
        batches=batches,
    )


everyone = st.builds(lambda count: CohortSampling(Sampling.NONE, count, count), whole)
releases = rows_of(Unit.CLIENT, OF_CLIENTS, samplings, st.none()) | rows_of(
    Unit.RECORD,
    [Adjacency.ADD_REMOVE, Adjacency.ZERO_OUT],
    everyone,
    st.builds(BatchSampling, rates, st.integers(1, 9)),
)
observers = st.sampled_from([RELEASED, SERVER]) | st.builds(colluding, st.integers(1, 9))
budgets = st.builds(Budget, floats, st.floats(0, 1, exclude_max=True), observers, st.integers(1, 9))


@given(releases)
@settings(deadline=None)
def test_a_release_survives_its_text_exactly(release):
    text = encode_release(release)
    assert decode_release(text) == release
    assert text.isascii()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@given(releases, releases)
@settings(deadline=None)
def test_different_releases_have_different_texts(one, other):
    assert (one == other) == (encode_release(one) == encode_release(other))


def damaged(text: str, place: int, character: str) -> list[str]:
    at = place % len(text)
    return [text[:at] + character + text[at + 1 :], text[:at] + text[at + 1 :], text[:at] + character + text[at:]]


@given(releases, st.integers(0, 10**6), st.sampled_from('0123456789abc/,:{}[]" -.ep='))
@settings(deadline=None, max_examples=300)
def test_a_damaged_text_is_refused_or_is_canonical(release, place, character):
    for text in damaged(encode_release(release), place, character):
        try:
            other = decode_release(text)
        except LedgerError:
            continue
        assert encode_release(other) == text


@given(budgets, st.integers(0, 10**6), st.sampled_from('0123456789abc/,:{}" -.p'))
@settings(deadline=None)
def test_a_budget_survives_its_text_exactly_and_no_other_text_is_read(budget, place, character):
    assert decode_body(canonical.encode(budget), Budget) == budget
    for text in damaged(canonical.encode(budget), place, character):
        try:
            other = decode_body(text, Budget)
        except LedgerError:
            continue
        assert canonical.encode(other) == text


def fields(**changes) -> str:
    release = Release(
        run="run",
        round=1,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=Adjacency.ZERO_OUT,
        sampling=CohortSampling(Sampling.FIXED, 10, 5),
        noise=DiscreteGaussianSum(Fraction(5, 2), 5, Fraction(1), 3),
        participants=(0, 3, 200),
    )
    return json.dumps(json.loads(encode_release(release)) | changes, sort_keys=True, separators=(",", ":"))


NOISE = {"law": "discrete-gaussian-sum", "sigma": "5/2", "contributors": 5, "radius": "1/1", "dimension": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 3},
        {"version": "2"},
        {"extra": 0},
        {"round": -1},
        {"round": 1.0},
        {"round": True},
        {"unit": "record"},
        {"unit": 3},
        {"adjacency": "add-remove"},
        {"sampling": []},
        {"sampling": {"method": "fixed", "population": 10, "cohort_size": 11}},
        {"sampling": {"method": "fixed", "population": 10, "cohort_size": 5, "extra": 1}},
        {"noise": NOISE | {"law": "laplace"}},
        {"noise": NOISE | {"sigma": "10/4"}},
        {"noise": NOISE | {"sigma": "2.5"}},
        {"noise": NOISE | {"sigma": "1/0"}},
        {"noise": NOISE | {"sigma": 2.5}},
        {"noise": NOISE | {"contributors": 0}},
        {"noise": {"law": "continuous-gaussian", "sigma": "0x1p0", "radius": "nan"}},
        {"noise": {"law": "continuous-gaussian", "sigma": "1.0", "radius": "1.0"}},
        {"participants": [0, 3]},
        {"participants": "AAKAgA"},
        {"participants": "gA=="},
        {"participants": "gAA="},
        {"participants": "A A="},
    ],
)
def test_a_text_with_one_wrong_field_is_refused(changes):
    assert decode_release(fields()).participants == (0, 3, 200)
    with pytest.raises(LedgerError):
        decode_release(fields(**changes))


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[" * 100_000, '{"a":NaN}', fields()[:-1] + ',"round":2}']
)
def test_what_is_no_release_is_refused(text):
    with pytest.raises(LedgerError):
        decode_release(text)


@pytest.mark.parametrize(
    "text", ["", "null", "{}", '{"version":1,"epsilon":"0x1p0","delta":"0x0p0","observer":3}']
)
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(LedgerError):
        decode_body(text, Budget)


def test_participants_cost_about_a_byte_and_a_third_each():
    release = decode_release(fields())
    cohort = Release(
        run="run",
        round=1,
        attempt=0,
        unit=release.unit,
        adjacency=release.adjacency,
        sampling=CohortSampling(Sampling.FIXED, 100_000, 1000),
        noise=release.noise,
        participants=tuple(range(17, 100_017, 100)),
    )
    assert len(encode_release(cohort)) < 1400 + len(encode_release(release))


def test_a_negative_identity_is_refused_before_it_is_written():
    release = decode_release(fields())
    with pytest.raises(ConfigError, match="at least 0"):
        encode_release(
            Release(
                run="run",
                round=0,
                attempt=0,
                unit=release.unit,
                adjacency=release.adjacency,
                sampling=release.sampling,
                noise=release.noise,
                participants=(-1, 2),
            )
        )


def test_a_row_is_hashed_from_the_canonical_text_of_its_fields():
    """The text is put together by hand; the planted twin swaps two fields."""
    for key in (None, Key('a "run" \u00e9\\', 3, 1)):
        row = chained_row(
            Head(4, bytes(32)), epoch=2, kind=RowKind.COMMIT, key=key, body='{"a":"\u00fc"}', epsilon=0.1
        )
        fields = (row.seq, row.epoch, row.kind, row.key, row.body, row.epsilon)
        assert row.hash == digest("d2pfed ledger row", bytes(32), canonical.encode(fields))
        assert row.hash != digest(
            "d2pfed ledger row", bytes(32), canonical.encode((row.epoch, row.seq, *fields[2:]))
        )


def gap_by_gap(data: bytes) -> tuple[int, ...] | None:
    """The identities of a packed text's bytes, read plainly; None if a gap is cut off or longer than it must be."""
    identities, gap, shift, previous = [], 0, 0, -1
    for byte in data:
        gap |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            if byte == 0 and shift > 7:
                return None
            previous += gap + 1
            identities.append(previous)
            gap, shift = 0, 0
    return None if shift else tuple(identities)


@given(st.lists(st.sampled_from([0, 1, 5, 127, 128, 129, 200, 255]), max_size=8).map(bytes))
def test_participants_are_read_as_gap_by_gap(data):
    text, wanted = base64.b64encode(data).decode(), gap_by_gap(data)
    if wanted is None:
        with pytest.raises(ValueError, match="a participant has more bytes"):
            _unpack(text)
    else:
        assert _unpack(text) == wanted


def test_a_head_survives_its_text():
    head = Head(12, bytes(range(32)))
    assert Head.decode(head.encode()) == head
