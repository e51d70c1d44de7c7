"""Audits find what is planted, find nothing where nothing is, and reach most of what is claimed."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy.stats import binom, norm
from typer.testing import CliRunner

from d2pfed.accounting import Adjacency, Sampling
from d2pfed.api.audit import Worlds, audit_mechanism, audit_training, audited_plan, write_plot
from d2pfed.api.audit.bounds import (
    counted_epsilon,
    gaussian_epsilon,
    one_run_epsilon,
    one_run_gaussian_epsilon,
    one_run_p_value,
    refutes_gaussian,
    upper_rate,
)
from d2pfed.api.audit.membership import MembershipCurve, curve
from d2pfed.api.audit.training import Canaries, CanaryRecords, WatchedSum, guess
from d2pfed.cli import audit as audit_command
from d2pfed.cli import train as train_command
from d2pfed.errors import ConfigError
from d2pfed.learning import LocalTraining, RecordTrainer, build_model, load_task
from d2pfed.noise import mechanisms
from d2pfed.noise.mechanisms import Share
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.simulation import Dropouts, Fidelity, SerialBackend
from d2pfed.training import ServerOptimizer
from reproduction.job import Settings, task_job
from support.adjacencies import OF_CLIENTS


def target(**changes):
    return PrivacyTarget(**{"cohort_size": 3, "epsilon": 4.0, "delta": 1e-5, "against": "server"} | changes)


def attacked(plan, trials, **options):
    return audit_mechanism(
        plan, trials, entropy=Entropy.replay(b"audit"), fidelity=options.pop("fidelity", Fidelity.SUM), **options
    )


# Of jax_privacy 2.0.0: canaries, guesses, correct, epsilon, delta, p-value.
P_VALUES = [
    (100, 100, 70, 0.5, 0.0, 0.06564798139147554),
    (1000, 500, 330, 0.3, 1e-05, 0.000374344054615338),
    (1000, 250, 200, 1.0, 1e-06, 0.007265272648162367),
    (10000, 10000, 6000, 0.2, 1e-09, 3.2639621955002233e-08),
    (75, 75, 61, 0.7, 0.0001, 0.004874376372109972),
    (10, 5, 0, 1.0, 0.001, 1.0),
]
# The same: canaries, guesses, correct, level, delta, epsilon.
EPSILONS = [
    (100, 100, 70, 0.05, 0.0, 0.47167184155533143),
    (1000, 500, 330, 0.05, 1e-05, 0.5039753382725872),
    (1000, 250, 200, 0.0125, 1e-06, 1.0299685199597708),
    (10000, 10000, 6000, 0.05, 1e-09, 0.37170601698663835),
    (75, 75, 61, 0.05, 0.0001, 0.9596687795820597),
    (100, 100, 50, 0.05, 1e-05, 0.0),
]
# The same, by its bound for Gaussian trade-off curves.
GAUSSIAN_EPSILONS = [
    (100, 100, 70, 0.05, 1e-05, 1.0607029230699714),
    (1000, 500, 330, 0.05, 1e-05, 0.8860250168734625),
    (1000, 250, 200, 0.0125, 1e-06, 1.7188243414195288),
    (10000, 10000, 6000, 0.05, 1e-09, 0.948130386336943),
    (75, 75, 61, 0.05, 0.0001, 1.870447844806694),
    (100, 100, 50, 0.05, 1e-05, 0.0),
    (10000, 1250, 1200, 0.00625, 1e-05, 3.504367566230678),
]


@pytest.mark.parametrize("case", P_VALUES, ids=str)
def test_p_values_are_those_of_another_implementation(case):
    *given, expected = case
    assert one_run_p_value(*given) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", EPSILONS, ids=str)
def test_one_run_bounds_are_those_of_another_implementation(case):
    canaries, guesses, correct, level, delta, expected = case
    assert one_run_epsilon(canaries, guesses, correct, delta, level) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("case", GAUSSIAN_EPSILONS, ids=str)
def test_gaussian_one_run_bounds_equal_another_implementation(case):
    canaries, guesses, correct, level, delta, expected = case
    assert one_run_gaussian_epsilon(canaries, guesses, correct, delta, level) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("canaries", "mu"), [(10, 0.5), (200, 0.2), (200, 1.0), (1000, 3.0)])
def test_the_true_gaussian_curve_is_refuted_at_most_at_the_level(canaries, mu):
    """Each coin is guessed from N(+-mu/2, 1), so the right guesses are binomial and the chance is exact."""
    right, level = norm.cdf(mu / 2), 0.05

    def refuted(at):
        counts = range(canaries + 1)
        return next((c for c in counts if refutes_gaussian(canaries, canaries, c, at, level)), canaries + 1)

    assert binom.sf(refuted(mu) - 1, canaries, right) <= level
    if mu >= 1:
        assert refuted(mu / 4) <= right * canaries  # and a quarter of it mostly is


def test_more_right_guesses_never_refute_less():
    found = [one_run_gaussian_epsilon(200, 100, correct, 1e-5, 0.05) for correct in range(0, 101, 4)]
    assert found == sorted(found)
    assert found[0] == 0 < found[-1]
    with pytest.raises(ConfigError, match="correct <= guesses <= canaries"):
        one_run_epsilon(10, 5, 6, 1e-5, 0.05)


@pytest.mark.parametrize(
    ("errors", "trials", "alpha", "expected"),
    [(0, 100, 0.05, 0.029513049607), (3, 100, 0.005, 0.105481253725), (640, 2000, 0.0025, 0.350006690339)],
)
def test_rates_are_bounded_as_by_another_implementation(errors, trials, alpha, expected):
    assert upper_rate(errors, trials, alpha) == pytest.approx(expected, rel=1e-9)
    assert upper_rate(trials, trials, alpha) == 1


def test_randomized_response_has_exactly_the_p_value_of_the_theorem():
    """All coins of six canaries, each reported right with probability 3/4: the theorem's bound is attained."""
    right, count = 0.75, 6
    for correct in range(count + 1):
        exact = sum(
            math.prod(right if each else 1 - right for each in outcome)
            for outcome in product((True, False), repeat=count)
            if sum(outcome) >= correct
        )
        assert one_run_p_value(count, count, correct, math.log(3), 0.0) == pytest.approx(exact, rel=1e-12)


def test_bounds_of_two_gaussians_are_below_their_epsilon_and_near_it():
    """Errors as N(0, 1) and N(1, 1) give them at the middle; epsilon at delta 1e-5 is 4.38."""
    errors = (308_538, 308_538)
    assert 4.2 < gaussian_epsilon(errors, 1_000_000, 1e-5, 0.01) < 4.38
    assert 0.7 < counted_epsilon(errors, 1_000_000, 1e-5, 0.01) < 0.81
    assert gaussian_epsilon((500, 501), 1000, 1e-5, 0.01) == counted_epsilon((500, 501), 1000, 1e-5, 0.01) == 0
    assert gaussian_epsilon((999, 1000), 1000, 1e-5, 0.01) == 0  # worse than chance refutes nothing


@pytest.mark.parametrize("compression", ["off", 2])
def test_the_audit_reaches_most_of_the_claim_and_not_more(compression):
    found = attacked(audited_plan(target(epsilon=8.0, compression=compression)), 1500)
    assert 0.7 * found.claimed <= found.gaussian <= found.claimed
    assert 0 < found.counted <= found.claimed
    assert not found.is_refuted


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mechanism": "shared"},
        {"adjacency": "zero-out"},
        {"rotation": "phase"},
        {"compression": 4},
        {"cohort_size": 4, "dropouts": 0.25},
    ],
    ids=str,
)
def test_the_audit_of_every_message_reaches_most_of_the_claim(changes):
    found = attacked(audited_plan(target(**changes)), 4000, fidelity=Fidelity.PROTOCOL)
    assert 0.7 * found.claimed <= found.gaussian <= found.claimed
    assert not found.is_refuted


def test_both_fidelities_see_the_same():
    plan = audited_plan(target(dropouts=0.4))
    one, other = (attacked(plan, 5, fidelity=fidelity) for fidelity in Fidelity)
    assert one.errors == other.errors
    assert one.survivors == 2


@pytest.mark.parametrize("adjacency", OF_CLIENTS)
def test_a_null_run_finds_nothing(adjacency):
    found = attacked(audited_plan(target(adjacency=adjacency)), 200, worlds=Worlds.SAME)
    assert found.counted == found.gaussian == 0


def halve_the_noise(monkeypatch):
    right = mechanisms.CenteredDiscreteGaussian
    monkeypatch.setattr(mechanisms, "CenteredDiscreteGaussian", lambda sigma, bits: right(sigma / 2, bits))
    return audited_plan(target())


def account_for_half_the_sensitivity(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Adjacency, "radii", property(lambda _self: 1))
        return audited_plan(target())


def lose_one_share(monkeypatch):
    right = Share.part
    monkeypatch.setattr(Share, "part", lambda self, total: right(self, total) * (self.rank < self.holders - 1))
    return audited_plan(target(cohort_size=2, mechanism="shared"))


def use_noise_again(monkeypatch):
    right = Entropy.child
    monkeypatch.setattr(
        Entropy, "child", lambda self, *path: right(self, *path[:1] if path[0] == "contribution" else path)
    )
    return audited_plan(target())


@pytest.mark.parametrize(
    "plant", [halve_the_noise, account_for_half_the_sensitivity, lose_one_share, use_noise_again]
)
def test_a_planted_defect_of_the_mechanism_is_found(plant, monkeypatch):
    plan = plant(monkeypatch)
    with monkeypatch.context() as patch:
        if plant is account_for_half_the_sensitivity:
            patch.setattr(Adjacency, "radii", property(lambda _self: 1))
        found = attacked(plan, 400)
    assert found.is_refuted
    assert found.gaussian > found.claimed


@pytest.mark.parametrize("clip", [1e-29, 1e29])
def test_no_size_of_the_clip_blinds_the_attack_or_refutes_what_is_true(clip):
    found = attacked(audited_plan(target(epsilon=8.0, clip=clip)), 200)
    assert 0.4 * found.claimed < found.gaussian <= found.claimed
    null = attacked(audited_plan(target(epsilon=8.0, clip=clip)), 200, worlds=Worlds.SAME)
    assert null.gaussian == null.counted == 0


def test_an_audit_refuses_what_it_is_not_about():
    for clip in (1e31, 1e-31):
        with pytest.raises(ConfigError, match="an audit needs a clip in"):
            attacked(audited_plan(target(clip=clip)), 1)
    with pytest.raises(ConfigError, match="against the server"):
        audited_plan(target(against="released"))
    with pytest.raises(ConfigError, match="trials must be at least 1"):
        audit_mechanism(audited_plan(target()), 0)


def job_of(task, fidelity=Fidelity.SUM, **wanted):
    """A run over digits of a logistic model, against the server."""
    settings = Settings(
        task="digits",
        data=task.description,
        model="logistic",
        target=PrivacyTarget(dimension=650, delta=1e-9, against="server", **wanted),
        local=LocalTraining(),
        server=ServerOptimizer(),
        dropouts=Dropouts(),
        fidelity=fidelity,
        seed=None,
    )
    return task_job(settings, task, build_model("logistic", task, seed=0), calibrate(settings.target))


def job(epsilon, mechanism="centered"):
    wanted = {"population": 100, "cohort_size": 50, "rounds": 2, "spare": 0, "sampling": Sampling.ONCE}
    return job_of(load_task("digits"), epsilon=epsilon, mechanism=mechanism, **wanted)


def audited(epsilon, confidence=0.95, **changes):
    trained, coins = job(epsilon, **changes), Entropy.replay(b"coins")
    return audit_training(trained, 100, SerialBackend, lambda _record: True, entropy=coins, confidence=confidence)


def test_canaries_stay_below_the_claim():
    found = audited(
        0.5, confidence=1 - 1e-6
    )  # the noise is the system's: a bound of 95 % fails one time in twenty
    assert found.present == found.canaries == 100
    assert max(found.lower, found.gaussian) < found.claimed <= 0.5
    assert not found.is_refuted


def test_canaries_refute_training_without_noise(monkeypatch):
    right = mechanisms.GaussianDistribution
    monkeypatch.setattr(mechanisms, "GaussianDistribution", lambda center, _square: right(center, Fraction(1, 16)))
    found = audited(0.5, mechanism="ddgauss")
    assert found.correct > 0.9 * found.guesses
    assert found.is_refuted
    assert found.gaussian > found.lower > found.claimed


def test_coins_and_canaries_are_of_the_given_entropy_and_fair():
    plan = job(0.5).plan
    units = [1] * 100
    drawn = Canaries.draw(100, plan, units, [], Entropy.replay(b"fair"))
    assert 25 < drawn.coins.sum() < 75
    assert len(set(drawn.coordinates.tolist())) == 100
    assert not np.array_equal(drawn.coins, Canaries.draw(100, plan, units, [], Entropy.replay(b"other")).coins)
    with pytest.raises(ConfigError, match="canaries must be in"):
        Canaries.draw(101, plan, units, [], Entropy.replay(b"fair"))


def silos_job(epsilon, fidelity=Fidelity.SUM):
    task = load_task("digits", population=5)
    records = RecordTrainer(build_model("logistic", task, seed=0), task.clients).count_all()
    wanted = {"population": 5, "cohort_size": 5, "rounds": 4, "sampling": Sampling.NONE}
    return job_of(task, fidelity, epsilon=epsilon, unit="record", records=records, batch_rate=0.5, **wanted)


def audited_silos(epsilon, count=100, **changes):
    return audit_training(
        silos_job(epsilon, **changes), count, SerialBackend, lambda _: True, entropy=Entropy.replay(b"coins")
    )


@pytest.mark.parametrize("fidelity", Fidelity)
def test_canary_records_of_silos_stay_below_the_claim(fidelity):
    found = audited_silos(0.5, fidelity=fidelity)
    assert (found.unit, found.present, found.canaries) == ("record", 100, 100)
    assert found.lower < found.claimed <= 0.5  # sampled records have no Gaussian curve
    assert "about a record than claimed" in found.shows


def test_canaries_of_whom_none_took_part_show_nothing(monkeypatch):
    monkeypatch.setattr(WatchedSum, "unmask", lambda self: self.inner.unmask())
    with pytest.raises(ConfigError, match="none of 100 canaries took part"):
        audited(0.5)


def test_canary_records_refute_silos_without_noise(monkeypatch):
    monkeypatch.setattr(mechanisms.Centered, "around", lambda _self, total, bits, _entropy: total >> bits)
    found = audited_silos(0.5)
    assert found.is_refuted
    assert found.gaussian > found.lower > found.claimed
    assert not replace(found, lower=0.0).is_refuted  # sampled records have no Gaussian curve


def test_canary_records_take_the_places_of_records_and_no_others_change():
    job = silos_job(0.5)
    trainer = RecordTrainer(job.model, job.clients).tried(job.model.initial(), 10.0)
    units, params = [trainer.count(silo) for silo in range(5)], job.model.initial()
    drawn = Canaries.draw(60, job.plan, units, [], Entropy.replay(b"places"))
    assert len(drawn.places) == 60
    assert all(0 <= record < units[silo] for silo, record in drawn.places)
    assert (drawn.low, drawn.rate) == (0.0, 0.5)
    wanted = [(silo, np.arange(units[silo])) for silo in (0, 3)]

    def rows(source):
        return np.concatenate([vectors.copy() for _, vectors in source.chunks(params, wanted)])

    changed, plain = rows(CanaryRecords(trainer, drawn)), rows(trainer)
    pairs = [(silo, record) for silo, chosen in wanted for record in chosen.tolist()]
    for pair, found, before in zip(pairs, changed, plain, strict=True):
        place = drawn.places.get(pair)
        expected = before if place is None else drawn.update(place, len(params))
        np.testing.assert_array_equal(found, expected)


def test_canary_records_are_bounded_by_the_records():
    plan = silos_job(0.5).plan
    with pytest.raises(ConfigError, match=r"canaries must be in \[1, 7\]: no two share a record"):
        Canaries.draw(8, plan, [3, 4], [], Entropy.replay(b"few"))


def test_canaries_are_where_others_send_least():
    sent = [np.eye(650, dtype=np.float32)[:300], 1e6 * np.eye(650, dtype=np.float32)[300:500]]
    drawn = Canaries.draw(100, job(0.5).plan, [1] * 100, sent, Entropy.replay(b"quiet"))
    assert drawn.coordinates.tolist() == list(range(500, 600))


def test_the_surest_guesses_count():
    scores, coins = np.array([3.0, -2.0, 0.5, -0.1]), np.array([True, False, False, False])
    assert [guess(scores, coins, count) for count in (1, 2, 3, 4)] == [1, 2, 2, 3]


def test_a_curve_is_that_of_its_thresholds():
    false, true = curve(np.array([3.0, 2.0, 2.0]), np.array([2.0, 1.0]))
    assert false.tolist() == [0, 0, 0.5, 1]
    assert true.tolist() == pytest.approx([0, 1 / 3, 1, 1])


PLANTED = """
from pathlib import Path
from d2pfed.learning import build_model, load_task

def task():
    Path("executed").touch()
    return load_task("digits", population=100)

def model():
    Path("executed").touch()
    return build_model("logistic", load_task("digits", population=100), seed=0)
"""


@pytest.mark.parametrize("what", ["task", "model"])
@pytest.mark.parametrize("command", ["training", "membership"])
def test_an_audit_executes_no_code_that_only_the_run_names(command, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with job(30.0).open(tmp_path / "run", None):
        settings = (tmp_path / "run" / "settings.json").read_text()
    own = {"task": '"digits"', "model": '"logistic"'}[what]
    assert settings.count(f'"{what}":{own}') == 1
    lie = settings.replace(f'"{what}":{own}', f'"{what}":"received_code:{what}"')
    (tmp_path / "run" / "settings.json").write_text(lie)
    (tmp_path / "received_code.py").write_text(PLANTED)  # or it is a module that is installed

    def executed(*options: str) -> bool:
        (tmp_path / "executed").unlink(missing_ok=True)
        found = CliRunner().invoke(audit_command.app, [command, "run", *options])
        assert isinstance(found.exception, ConfigError)  # if not for this, then as nobody took part
        is_executed = (tmp_path / "executed").exists()
        assert is_executed != (f"trust it, name it with --{what}" in str(found.exception))
        return is_executed

    assert not executed()
    assert executed(f"--{what}", f"received_code:{what}")
    monkeypatch.setattr(audit_command, "require_trusted", lambda name, _given, _option: name)
    assert executed()


def test_an_audit_writes_no_plot_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plots").symlink_to(tmp_path / "elsewhere")
    rates = np.array([0.0, 1.0])
    found = MembershipCurve(
        false_positive=rates, true_positive=rates, members=9, others=9, others_are="", epsilon=1.0, delta=1e-5
    )
    with pytest.raises(ConfigError, match="plots must not be a link: files would be written elsewhere"):
        write_plot(found, tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.setattr("d2pfed.runs.report.require_no_link", lambda _path: None)
    write_plot(found, tmp_path / "run")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_commands_audit_a_run_and_its_report_shows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    trained = run(
        train_command.app,
        ["--task", "digits", "--name", "a", "--rounds", "2", "--cohort-size", "40", "--backend", "in-process"],
    )
    assert trained.exit_code == 0, trained.output
    found = run(audit_command.app, ["training", "runs/a", "--canaries", "50", "--json"])
    assert found.exit_code == 0, found.output
    shown = json.loads(found.stdout)
    assert shown["lower"] <= shown["claimed"]
    assert "Audited with canary clients" in (tmp_path / "runs/a/report.html").read_text()
    found = run(audit_command.app, ["membership", "runs/a", "--json"])
    assert found.exit_code == 0, found.output
    assert 0.3 < json.loads(found.stdout)["area"] < 0.7
    assert (tmp_path / "runs/a/plots/membership.svg").exists()
    found = run(audit_command.app, ["mechanism", "--trials", "5", "--json"])
    assert json.loads(found.stdout)["trials"] == 5
