"""`d2pfed account`: the epsilon of given parameters under a named accountant."""

import math
from enum import StrEnum
from typing import Annotated

import typer

from d2pfed.accounting import Accountant, Adjacency, CohortSampling, Sampling, cpsgd_epsilon, epsilon_of, round_up
from d2pfed.cli.options import AsJson, CohortSize, Neighbours, Population, Rounds, SamplingScheme
from d2pfed.cli.show import delta_as_given, out, print_json
from d2pfed.errors import ConfigError
from d2pfed.plan.bounds import MOST_POPULATION, MOST_ROUNDS, check_range

MOST_DIMENSION, MOST_TRIALS, MOST_LEVELS = 1 << 31, 1 << 53, 1 << 31
LEAST_MULTIPLIER, MOST_MULTIPLIER = 1e-3, 1e6


class Name(StrEnum):
    """The accountants by name."""

    WBK_MIRONOV = "wbk-mironov"
    WBK = "wbk"
    RDP = "rdp"
    PLD = "pld"
    BINOMIAL = "binomial"


def account(
    *,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Sigma over the sensitivity of the stated adjacency.")
    ] = None,
    sampling: SamplingScheme = Sampling.FIXED,
    population: Population = 100_000,
    cohort: CohortSize = 100,
    rounds: Rounds = 100,
    delta: Annotated[float, typer.Option(help="Failure probability.")] = 1e-5,
    accountant: Annotated[Name, typer.Option(help="wbk-mironov is the paper's; binomial is cpSGD's.")] = Name.PLD,
    adjacency: Neighbours = Adjacency.REPLACE_ONE,
    trials: Annotated[int | None, typer.Option(help="binomial: fair coins in the whole sum.")] = None,
    levels: Annotated[int | None, typer.Option(help="binomial: quantisation levels.")] = None,
    dimension: Annotated[int, typer.Option(help="binomial: coordinates.")] = 51_370,
    delta_per_round: Annotated[float, typer.Option(help="binomial: failure probability of one round.")] = 1e-6,
    json: AsJson = False,
) -> None:
    """Say what epsilon follows from given noise, sampling and rounds."""
    drawn = CohortSampling(sampling, population, cohort)
    for name, value, most in (
        ("population", population, MOST_POPULATION),
        ("rounds", rounds, MOST_ROUNDS),
        ("dimension", dimension, MOST_DIMENSION),
        ("trials", 1 if trials is None else trials, MOST_TRIALS),
        ("levels", 2 if levels is None else levels, MOST_LEVELS),
    ):
        check_range(name, value, 2 if name == "levels" else 1, most)
    if noise_multiplier is not None and not LEAST_MULTIPLIER <= noise_multiplier <= MOST_MULTIPLIER:
        raise ConfigError(
            f"noise_multiplier must be in [{LEAST_MULTIPLIER:g}, {MOST_MULTIPLIER:g}], got {noise_multiplier:g}"
        )
    if accountant is Name.BINOMIAL:
        if trials is None or levels is None:
            raise ConfigError("the accountant binomial needs --trials and --levels")
        epsilon = cpsgd_epsilon(
            trials=trials,
            levels=levels,
            dimension=dimension,
            rate=cohort / population,
            rounds=rounds,
            delta=delta,
            delta_per_round=delta_per_round,
        )
    else:
        if noise_multiplier is None:
            raise ConfigError(f"the accountant {accountant} needs --noise-multiplier")
        epsilon = epsilon_of(
            noise_multiplier,
            drawn,
            rounds,
            adjacency=adjacency,
            delta=delta,
            accountant=Accountant(accountant.value),
        )
    if not math.isfinite(epsilon):
        raise ConfigError(f"this noise keeps no epsilon at delta {delta:g}: {accountant} finds it infinite")
    result = {
        "epsilon": epsilon,
        "delta": delta,
        "accountant": accountant,
        "adjacency": adjacency,
        "sampling": sampling,
        "population": population,
        "cohort": cohort,
        "rounds": rounds,
        "noise_multiplier": noise_multiplier,
        "trials": trials,
        "levels": levels,
    }
    if json:
        print_json(result)
    else:
        out().print(
            f"epsilon {round_up(epsilon, 7)} at delta {delta_as_given(delta)} by {accountant}: {rounds} rounds of "
            f"{cohort} in {population} clients, {sampling}, {adjacency}, one client"
        )
