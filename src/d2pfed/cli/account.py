"""`d2pfed account`: the epsilon of given parameters under a named accountant."""

from enum import StrEnum
from typing import Annotated

import typer

from d2pfed.accounting import Accountant, Adjacency, Sampling, Scheme, cpsgd_epsilon, epsilon_of, round_up
from d2pfed.cli.options import AsJson, CohortSize, Neighbours, Population, Rounds, SamplingScheme
from d2pfed.cli.show import out, print_json
from d2pfed.errors import ConfigError


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
    sampling: SamplingScheme = Scheme.FIXED,
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
            Sampling(sampling, population, cohort),
            rounds,
            adjacency=adjacency,
            delta=delta,
            accountant=Accountant(accountant.value),
        )
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
            f"epsilon {round_up(epsilon, 7)} at delta {round_up(delta, 6)} by {accountant}: {rounds} rounds of {cohort} in "
            f"{population} clients, {sampling}, {adjacency}, one client"
        )
