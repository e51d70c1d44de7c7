import pytest

from campaign_secagg import DELIVERIES, MATRIX, Cell, loss_of, run_cell, sessions
from d2pfed.errors import TooFewClients
from d2pfed.numerics.ring import Ring
from d2pfed.secagg import Delivery
from d2pfed.secagg.pairwise import server
from support.federation import Federation, make_session, run_round


@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_any_dropouts_give_the_exact_sum_or_a_void_attempt(cell):
    run_cell(cell, size=20, seed=0)


def test_random_sessions_give_the_exact_sum_or_a_void_attempt():
    assert sessions(60).endswith("0 wrong")


def test_the_dropout_matrix_has_sums_and_void_attempts():
    outcomes = {run_cell(cell, size=10, seed=1) for cell in MATRIX if cell.moment == "before"}
    assert outcomes == {"sum", "void"}


@pytest.mark.parametrize("phase", ["advertise", "share", "mask"])
def test_where_everyone_must_deliver_one_missing_client_voids_the_attempt(phase):
    session = make_session(6, delivery=Delivery.EVERYONE, quorum=6)
    cell = Cell(phase, "one", "after", Delivery.EVERYONE)
    with pytest.raises(TooFewClients):
        run_round(Federation(session), loss_of(cell, {session.cohort[2]}))


def plant(monkeypatch, change):
    """Have the server take other masks off: a change of those that are added and those that are subtracted."""
    unmask, add = server.unmask, Ring.add_masks_into

    def planted(aggregate, shares):
        with monkeypatch.context() as patch:  # clients add theirs by the same kernel
            patch.setattr(
                Ring, "add_masks_into", lambda ring, total, *masks: add(ring, total, *change(*map(list, masks)))
            )
            return unmask(aggregate, shares)

    monkeypatch.setattr(server, "unmask", planted)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_the_dropout_matrix_notices_a_mask_forgotten_at_unmasking(delivery, monkeypatch):
    plant(monkeypatch, lambda added, subtracted: (added, subtracted[:-1]))
    with pytest.raises(AssertionError, match="wrong sum"):
        run_cell(Cell("mask", "none", "before", delivery), size=20, seed=0)


def test_the_dropout_matrix_notices_a_mask_of_the_wrong_sign(monkeypatch):
    plant(monkeypatch, lambda added, subtracted: (added + subtracted[-1:], subtracted[:-1]))
    with pytest.raises(AssertionError, match="wrong sum"):
        run_cell(Cell("mask", "one", "after", Delivery.QUORUM), size=20, seed=0)
