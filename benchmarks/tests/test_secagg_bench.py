import numpy as np
import pytest

from benchmarks import secagg as bench
from benchmarks import standing
from benchmarks.crowd import Crowd
from benchmarks.flower_secagg import estimate_flower, measure_flower
from benchmarks.scales import ALONE, BESIDE_FLOWER, GROWTH, Scale
from d2pfed.errors import ConfigError
from d2pfed.secagg import Consistency, upload_bytes
from d2pfed.secagg.wire import CONTEXT_BYTES, HEADER_BYTES

SMALL = Scale(clients=6, dimension=50, bits=8, dropouts=1)


def test_a_measured_round_is_a_checked_round():
    scale = Scale(clients=6, dimension=50, bits=8, dropouts=1)
    (row,) = bench.bench_secagg([scale])
    assert row.upload_bytes == upload_bytes(scale.session())
    assert row.server_seconds > 0
    assert row.client_seconds > 0


@pytest.mark.parametrize("consistency", Consistency, ids=lambda value: value.value)
def test_a_crowd_round_is_checked_too(consistency):
    scale = Scale(clients=12, dimension=100, bits=16, dropouts=2, consistency=consistency)
    row = bench.measure_crowd(scale)
    assert row.upload_bytes == upload_bytes(scale.session())
    assert row.server_seconds > 0
    assert row.client_seconds > 0
    assert "one client and the server" in row.implementation


def test_a_crowd_that_masks_wrongly_is_a_benchmark_of_nothing(monkeypatch):
    monkeypatch.setattr(Crowd, "_masks", lambda self: np.zeros(64, np.uint32))
    with pytest.raises(ConfigError, match="its cost means nothing"):
        bench.measure_crowd(Scale(clients=12, dimension=100, bits=16, dropouts=2))


def test_the_sums_of_signed_rounds_are_checked_too():
    (row,) = bench.bench_secagg(
        [Scale(clients=6, dimension=50, bits=8, dropouts=1, consistency=Consistency.SIGNED)]
    )
    assert row.server_seconds > 0


@pytest.mark.parametrize("scale", [*BESIDE_FLOWER, *ALONE, *GROWTH], ids=str)
def test_every_scale_has_a_session_and_its_dropouts(scale):
    session = scale.session()
    assert len(scale.lost) == scale.dropouts <= len(session.cohort) - session.quorum
    assert scale.is_crowd == (scale.clients == 1_000)


def test_rounds_with_standing_keys_are_checked_and_measured_beside_the_main_protocol():
    scale = Scale(clients=6, dimension=50, bits=8, dropouts=0, consistency=Consistency.SIGNED)
    main, set_up, step = standing.bench_standing([scale])
    epoch = standing.epoch_of(scale)
    assert step.upload_bytes == HEADER_BYTES + CONTEXT_BYTES + epoch.ring.packed_bytes(epoch.dimension)
    assert step.upload_bytes < main.upload_bytes
    assert set_up.upload_bytes == 2 * HEADER_BYTES + 200 + 32
    assert min(row.client_seconds for row in (main, set_up, step)) > 0


def test_flowers_round_is_checked_too():
    pytest.importorskip("flwr")
    cost = measure_flower(6, 50, frozenset({2}))
    assert cost.server_seconds > 0
    assert cost.upload_bytes > 8 * 50


def test_what_flower_would_take_is_scaled_from_one_client():
    pytest.importorskip("flwr")
    cost = estimate_flower(6, 50, 1)
    assert cost.server_seconds > 0
    assert cost.upload_bytes == measure_flower(6, 50, frozenset({2})).upload_bytes


def test_a_crash_of_flower_is_a_row(monkeypatch):
    def crash(*_: object) -> None:
        raise TypeError("two\nlines")

    monkeypatch.setattr(bench, "measure_flower", crash)
    monkeypatch.setattr(bench, "BESIDE_FLOWER", (SMALL,))
    monkeypatch.setattr("benchmarks.peers.find_spec", lambda _name: True)
    ours, theirs = bench.bench_secagg([SMALL])
    assert ours.error == ""
    assert (theirs.implementation, theirs.error, theirs.round_seconds) == ("flower", "TypeError: two lines", None)


def test_flower_that_is_absent_says_which_extra_installs_it(monkeypatch):
    monkeypatch.setattr(bench, "BESIDE_FLOWER", (SMALL,))
    monkeypatch.setattr("benchmarks.peers.find_spec", lambda _name: None)
    _, theirs = bench.bench_secagg([SMALL])
    assert theirs.error == "not installed: pip install 'd2pfed[peers]'"
