"""`d2pfed account`: the epsilon of given parameters under a named accountant."""

import math
from enum import StrEnum
from typing import Annotated, Any

from d2pfed.accounting import Accountant, Adjacency, CohortSampling, cpsgd_epsilon, epsilon_of, round_up
from d2pfed.cli.options import AsJson, FieldOptions, SectionedCommand, application, option, with_fields
from d2pfed.cli.show import delta_as_given, out, print_json
from d2pfed.errors import ConfigError
from d2pfed.fields import PRIVACY, convert
from d2pfed.plan import PrivacyTarget
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


app = application()

SETTING = FieldOptions(
    kind=PrivacyTarget,
    only=("population", "cohort_size", "rounds", "delta", "sampling", "adjacency", "dimension"),
    defaults={
        "population": 100_000,
        "cohort_size": 100,
        "rounds": 100,
        "delta": 1e-5,
        "dimension": 51_370,
        "adjacency": Adjacency.REPLACE_ONE,
    },
)


@app.command(cls=SectionedCommand)
@with_fields(SETTING)
def account(
    setting: dict[str, Any],
    *,
    noise_multiplier: Annotated[
        float | None, option("Sigma over the sensitivity of the stated adjacency.", PRIVACY)
    ] = None,
    accountant: Annotated[
        Name, option("wbk-mironov is the paper's; binomial is cpSGD's. Default: pld.", PRIVACY)
    ] = Name.PLD,
    trials: Annotated[int | None, option("binomial: number of fair coins in the whole sum.", PRIVACY)] = None,
    levels: Annotated[int | None, option("binomial: number of quantisation levels.", PRIVACY)] = None,
    delta_per_round: Annotated[
        float, option("binomial: failure probability of one round. Default: 1e-06.", PRIVACY)
    ] = 1e-6,
    json: AsJson = False,
) -> None:
    """Show the epsilon that given noise, sampling and rounds amount to."""
    setting = convert(PrivacyTarget, setting | {"adjacency": setting["adjacency"] or Adjacency.REPLACE_ONE})
    population, cohort, rounds = setting["population"], setting["cohort_size"], setting["rounds"]
    sampling, adjacency, delta = setting["sampling"], setting["adjacency"], setting["delta"]
    dimension = setting["dimension"]
    if adjacency is Adjacency.ADD_REMOVE:
        raise ConfigError(
            "adjacency add-remove is of records (`d2pfed plan --unit record`), and this is of clients"
        )
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
        "cohort_size": cohort,
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
