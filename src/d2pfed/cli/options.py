"""The options that several commands share, declared once."""

from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from d2pfed.accounting import ALONE, CLIENT, RELEASED, SERVER, Adjacency, Observer, Sampling, colluding
from d2pfed.errors import ConfigError
from d2pfed.plan import MechanismName, RotationName
from d2pfed.secagg.graph import Consistency
from d2pfed.simulation import EXCHANGES, Backend, Dropouts, LocalTraining

Choice = TypeVar("Choice", bound=StrEnum)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
Epsilon = Annotated[float, typer.Option(help="How much the observer may learn about one client.")]
Delta = Annotated[
    float | None, typer.Option(help="Failure probability of the promise. [default: population^-1.1]")
]
Against = Annotated[
    str, typer.Option(help="Whom the promise is made against: released, server, client, colluding(c).")
]
Rounds = Annotated[int, typer.Option(help="Number of rounds.")]
Population = Annotated[int, typer.Option(help="Number of clients there are.")]
CohortSize = Annotated[int, typer.Option("--cohort-size", help="Number of clients asked in each round.")]
Mechanism = Annotated[MechanismName, typer.Option(help="How noise enters the sum.")]
SamplingScheme = Annotated[Sampling, typer.Option("--sampling", help="How cohorts are drawn.")]
Sizes = Annotated[str, typer.Option(help="Whether cohort sizes are known or secret (needs poisson sampling).")]
Neighbours = Annotated[Adjacency, typer.Option("--adjacency", help="Which two worlds are compared.")]
DropoutRate = Annotated[float, typer.Option("--dropouts", help="Fraction of a cohort that may be missing.")]
Colluders = Annotated[float, typer.Option(help="Share of the population that tells the server all it knows.")]
Draws = Annotated[
    int, typer.Option(help="Cohorts that the server can choose among, as clients verify; 0: they do not.")
]
Told = Annotated[
    str, typer.Option("--consistency", help="How clients know that all are told the same: assumed, signed.")
]
Spare = Annotated[
    int | None, typer.Option(help="Attempts beyond one a round that may be charged. [default: a tenth]")
]
Participations = Annotated[
    int | None, typer.Option(help="Cap on one client's contributions. [default: hardly ever binds]")
]
Clip = Annotated[float, typer.Option(help="L2 bound on one client's update.")]
Bits = Annotated[int | None, typer.Option(help="Bits a coordinate. [default: as few as serve]")]
Rotation = Annotated[RotationName, typer.Option(help="The random rotation.")]
DataDirectory = Annotated[Path | None, typer.Option("--data", help="Where data sets lie. [default: D2PFED_DATA]")]


def observer_named(name: str) -> Observer:
    """Return the observer of that name."""
    plain = {str(known): known for known in (RELEASED, SERVER, CLIENT, ALONE)}
    if name in plain:
        return plain[name]
    count = name.removeprefix("colluding(").removesuffix(")")
    if name == f"colluding({count})" and count.isdecimal() and len(count) <= 9:
        return colluding(int(count))
    raise ConfigError(f"against must be released, server, client, alone or colluding(c), got {name}")


def scheme_of(sampling: Sampling, sizes: str) -> Sampling:
    """Check that cohort sizes are as secret as the scheme needs them."""
    if sizes not in ("known", "secret"):
        raise ConfigError(f"sizes must be known or secret, got {sizes}")
    if (sampling is Sampling.POISSON) != (sizes == "secret"):
        raise ConfigError(
            f"poisson sampling and secret sizes go together, got sampling {sampling} and sizes {sizes}"
        )
    return sampling


def consistency_named(name: str) -> Consistency:
    """Return how clients know that all are told the same."""
    try:
        return Consistency(name)
    except ValueError:
        raise ConfigError(f"consistency must be assumed or signed, got {name}") from None


def one_of(kind: type[Choice], name: str) -> Choice:
    """Return the member of an enumeration with that value."""
    try:
        return kind(name)
    except ValueError:
        raise ConfigError(f"{kind.__name__.lower()} must be {', '.join(kind)}, got {name}") from None


def dropouts_of(text: str) -> Dropouts:
    """Return the simulated losses: one fraction before the third exchange, or four, one before each."""
    try:
        rates = [Fraction(part) for part in text.split(",")]
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"lost must be a fraction or four of them with commas between, got {text}") from None
    if len(rates) not in (1, len(EXCHANGES)):
        raise ConfigError(f"lost must be one fraction or {len(EXCHANGES)}, got {len(rates)}")
    return Dropouts(masked=rates[0]) if len(rates) == 1 else Dropouts(*rates)


def on_ray(local_training: LocalTraining, workers: int, address: str | None) -> Backend:
    """Return Ray workers, or say what to install."""
    try:
        from d2pfed.simulation.ray_backend import RayBackend  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ConfigError("the Ray backend needs Ray: pip install 'd2pfed[ray]'") from None
    return RayBackend(local_training, workers, address)
