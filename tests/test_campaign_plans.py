"""Plans through real clients, in small: nothing is wrong, and each hole that was there once is found again."""

import pytest

import campaign_plans
from d2pfed.accounting import Unit
from d2pfed.flower.private_client import PrivateClient
from d2pfed.plan import Policy, Protocol, policy
from d2pfed.round import standing_silo
from support import lying_plans
from support.ill_data import ILLS
from test_profiles import fragile, nothing

PAIRWISE = {(Protocol.PAIRWISE, Unit.CLIENT): 1}
STANDING = {(Protocol.STANDING, Unit.CLIENT): 1}


@pytest.fixture(autouse=True)
def few_kinds(monkeypatch):
    """A few rosters and calibrations, which are most of the work."""
    monkeypatch.setattr(campaign_plans, "SIZES", (4, 6))
    monkeypatch.setattr(campaign_plans, "MORE", (7,))
    monkeypatch.setattr(campaign_plans, "LARGE", 8)
    monkeypatch.setattr(lying_plans, "BASES", 3)


def test_random_plans_cost_no_more_than_clients_charge(tmp_path):
    found = campaign_plans.plans(30, tmp_path, "ci")
    assert found["failed"] == 0
    assert all(kind in found["result"] for kind in ("pairwise/client", "standing/client", "standing/record"))
    assert len(found["details"]) > 15  # rules


def test_twin_without_table_and_totality_weights_are_found_to_be_an_oracle(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(policy, "require_deployable", nothing)
    monkeypatch.setattr(PrivateClient, "_contribute", fragile)
    ills = {name: ILLS[Unit.CLIENT][name] for name in ("zeros", "a negative last number")}
    monkeypatch.setitem(campaign_plans.ILLS, Unit.CLIENT, ills)
    assert campaign_plans.plans(4, tmp_path, "twin", ("weights",), PAIRWISE)["failed"] > 0
    assert "'MASKED_VECTOR of" in (said := capsys.readouterr().err)
    assert "or 'refused: a weight must be at least 0'" in said


def test_twin_without_the_table_a_victim_is_found_among_colluders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign_plans, "SIZES", (300,))
    monkeypatch.setattr(Policy, "require_served", nothing)
    monkeypatch.setattr(standing_silo, "require_standing", nothing)
    assert campaign_plans.plans(6, tmp_path, "twin", ("none",), PAIRWISE)["failed"] > 0
    assert "standing: 1 honest vectors" in (said := capsys.readouterr().err)
    assert "standing: a sum with less noise than the charged variance" in said
    assert "was charged, dp-accounting has at least" in said
