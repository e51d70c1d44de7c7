"""Plans through real clients, in small: nothing is wrong, and each hole that was there once is found again."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import campaign_plans
from d2pfed.accounting import Unit, client_epsilon
from d2pfed.deploy import account as client_account
from d2pfed.deploy.client import PrivateClient
from d2pfed.noise.mechanisms import Centered
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import Ring
from d2pfed.plan import Policy, PrivacyTarget, Protocol, calibrate, policy
from d2pfed.round import session, standing
from support import lying_plans
from support.ill_data import ILLS
from support.noise_oracles import Measure, least_epsilon
from test_profiles import fragile, nothing

PAIRWISE = {(Protocol.PAIRWISE, Unit.CLIENT): 1}
STANDING = {(Protocol.STANDING, Unit.CLIENT): 1}
PLANNED = PrivacyTarget(
    dimension=64,
    population=8,
    cohort_size=8,
    rounds=2,
    epsilon=8.0,
    delta=1e-5,
    sampling="none",
    against="server",
    colluders=0.1,
)


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


def test_lies_about_colluders_are_refused_or_charged(tmp_path):
    assert campaign_plans.plans(8, tmp_path, "ci", ("colluders",), STANDING)["failed"] == 0


def test_twin_without_table_and_totality_weights_are_found_to_be_an_oracle(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(policy, "require_deployable", nothing)
    monkeypatch.setattr(PrivateClient, "_contribute", fragile)
    weights = {"zeros": "a weight", "a negative weight": "a negative weight"}
    ills = {name: ILLS[Unit.CLIENT][made] for name, made in weights.items()}
    monkeypatch.setitem(campaign_plans.ILLS, Unit.CLIENT, ills)
    assert campaign_plans.plans(4, tmp_path, "twin", ("weights",), PAIRWISE)["failed"] > 0
    assert "'MASKED_VECTOR of" in (said := capsys.readouterr().err)
    assert "or 'refused: a weight must be at least 0'" in said


def test_twin_without_the_table_a_victim_is_found_among_colluders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(campaign_plans, "SIZES", (300,))
    monkeypatch.setattr(campaign_plans, "DEPTHS", (5,))
    monkeypatch.setattr(Policy, "require_served", nothing)
    for module in (session, standing):
        monkeypatch.setattr(module, "require_standing", nothing)
    assert campaign_plans.plans(2, tmp_path, "twin", ("none",), PAIRWISE)["failed"] > 0
    assert "standing: 1 honest vectors" in (said := capsys.readouterr().err)
    assert "standing: a sum with less noise than the charged variance" in said
    assert "was charged, dp-accounting has at least" in said


# The oracles


def noise_of(sigma: int, count: int) -> np.ndarray:
    return Centered(Fraction(sigma)).around(np.zeros(count, np.int64), 0, Entropy.replay(b"pool"))


@pytest.mark.parametrize(("sigma", "lacks"), [(200, False), (199, True)])
def test_a_pool_finds_one_hundredth_less_variance(sigma, lacks):
    measure = Measure(1)
    measure.pool(noise_of(sigma, 2_000_000), 200.0**2)
    assert measure.pool_lacks() == lacks


@pytest.mark.parametrize(("sigma", "lacks"), [(200, False), (100, True)])
def test_a_single_sum_shows_half_of_its_noise(sigma, lacks):
    plan = calibrate(PLANNED)
    assert Measure(10_000).lacks(noise_of(sigma, 256), 200.0**2, replace(plan, ring=Ring(32))) == lacks


def test_a_vector_longer_than_its_radius_is_found():
    measure, noise = Measure(10_000), noise_of(10, 256)
    assert not measure.exceeds(noise, 0.0, 100.0)
    assert not measure.exceeds(noise + 50, 800.0, 100.0)
    assert measure.exceeds(noise + 50, 400.0, 100.0)


@pytest.mark.parametrize("changes", [{}, {"unit": Unit.RECORD, "records": 1000, "batch_rate": 0.3}])
def test_the_least_epsilon_is_close_below_what_a_client_charges(changes):
    plan = calibrate(replace(PLANNED, **changes))
    charge = client_account.charged(plan, "run", 0, 0)
    least = least_epsilon(plan, plan.quorum - plan.colluders, 2, 1e-5)
    assert 0.9 * client_epsilon([charge] * 2, 1e-5) < least <= client_epsilon([charge] * 2, 1e-5)
