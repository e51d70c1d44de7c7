import pytest

from d2pfed.bench import secagg as bench
from d2pfed.bench.flower_secagg import measure_flower
from d2pfed.bench.secagg import ALONE, BESIDE_FLOWER, GROWTH, Scale
from d2pfed.secagg import upload_bytes


def test_a_measured_round_is_a_checked_round():
    scale = Scale(clients=6, dimension=50, bits=8, dropouts=1)
    (row,) = bench.bench_secagg([scale])
    assert row.upload_bytes == upload_bytes(scale.session())
    assert row.server_seconds > 0
    assert row.client_seconds > 0


@pytest.mark.parametrize("scale", [*BESIDE_FLOWER, *ALONE, *GROWTH], ids=str)
def test_every_scale_has_a_session_and_its_dropouts(scale):
    session = scale.session()
    assert len(scale.lost) == scale.dropouts <= len(session.cohort) - session.quorum
    assert (session.degree == scale.clients - 1) == (scale.clients <= 100)


def test_flowers_round_is_checked_too():
    pytest.importorskip("flwr")
    cost = measure_flower(6, 50, frozenset({2}))
    assert cost.server_seconds > 0
    assert cost.upload_bytes > 8 * 50
