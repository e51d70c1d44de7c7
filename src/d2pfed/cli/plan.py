"""`d2pfed plan`: what noise, bits, bytes and epsilons a wish costs."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from d2pfed.accounting import Adjacency, Sampling, round_up
from d2pfed.cli import options
from d2pfed.cli.show import epsilons, out, plain, print_json
from d2pfed.plan import (
    VERIFIED_DRAWS,
    MechanismName,
    PlanSummary,
    PrivacyTarget,
    RotationName,
    calibrate,
    describe,
)
from d2pfed.round import sketch_of
from d2pfed.secagg import upload_bytes


def plan(
    *,
    epsilon: options.Epsilon = 1.0,
    delta: options.Delta = None,
    against: options.Against = "released",
    rounds: options.Rounds = 100,
    population: options.Population = 100_000,
    cohort: options.CohortSize = 100,
    dimension: Annotated[int, typer.Option(help="Number of parameters that are trained.")] = 51_370,
    mechanism: options.Mechanism = MechanismName.CENTERED,
    sampling: options.SamplingScheme = Sampling.FIXED,
    sizes: options.Sizes = "known",
    adjacency: options.Neighbours = Adjacency.REPLACE_ONE,
    dropouts: options.DropoutRate = 0.0,
    colluders: options.Colluders = 0.0,
    draws: options.Draws = VERIFIED_DRAWS,
    consistency: options.Told = "assumed",
    spare: options.Spare = None,
    max_participations: options.Participations = None,
    clip: options.Clip = 1.0,
    bits: options.Bits = None,
    rotation: options.Rotation = RotationName.HADAMARD,
    json: options.AsJson = False,
) -> None:
    """Say what a wish costs: noise, bits, bytes, error, and an epsilon for each observer."""
    target = PrivacyTarget(
        dimension=dimension,
        population=population,
        cohort_size=cohort,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        against=options.observer_named(against),
        mechanism=mechanism,
        sampling=options.scheme_of(sampling, sizes),
        adjacency=adjacency,
        dropouts=dropouts,
        colluders=colluders,
        draws=draws,
        consistency=options.consistency_named(consistency),
        spare=spare,
        max_participations=max_participations,
        clip=clip,
        bits=bits,
        rotation=rotation,
    )
    agreed = calibrate(target)
    price = describe(target, agreed)
    upload = upload_bytes(sketch_of(agreed))  # keys and shares included
    if json:
        per_observer = {str(item.observer): plain(item.epsilon) for item in price.guarantees}
        wish = {"options": plain(target), "sizes": sizes}
        bytes_sent = {"upload_bytes": upload, "vector_bytes": price.upload_bytes}
        spent = {"spent": price.guarantees, "epsilon": per_observer, "delta": agreed.delta}
        print_json(asdict(price) | bytes_sent | spent | wish)
        return
    console = out()
    console.print(_table(price, upload, dimension))
    for reason in (price.why_noise, price.why_bits, price.why_graph, price.why_colluders):
        console.print(reason)
    console.print(epsilons(price.guarantees))
    for warning in price.warnings:
        console.print(f"Warning: {warning}")


def _table(price: PlanSummary, upload: int, dimension: int) -> Table:
    table = Table(title="The plan", title_justify="left", show_header=False)
    for name, value in (
        ("noise on the sum (sigma)", f"{price.sigma:.5g}"),
        ("noise multiplier", f"{price.noise_multiplier:.4f}"),
        ("bits a coordinate", f"{price.bits}"),
        ("vector a client and round", f"{price.upload_bytes:,} bytes for {dimension:,} parameters"),
        ("upload with keys and shares", f"{upload:,} bytes"),
        ("chance that a sum wraps", f"at most {round_up(price.wrap_probability, 2)} a round"),
        ("error against a trusted server", f"{100 * (price.relative_error - 1):+.2f} %"),
        ("noise in the mean over the clip", f"{price.noise_to_clip:.3g}"),
        ("attempts that may be charged", f"{price.max_attempts}"),
        ("colluders in a cohort", f"at most {price.colluders}"),
        ("neighbours, threshold, cut off", f"{price.neighbours}, {price.threshold}, {price.cut_off}"),
    ):
        table.add_row(name, value)
    return table
