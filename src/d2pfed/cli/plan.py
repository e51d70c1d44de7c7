"""`d2pfed plan` and `d2pfed account`: what a privacy target requires, and the epsilon of given noise."""

import math
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated, Any

from d2pfed.accounting import (
    Accountant,
    Adjacency,
    CohortSampling,
    Sampling,
    Unit,
    cpsgd_epsilon,
    epsilon_of,
    round_up,
)
from d2pfed.api.complete_target import MAIN_JOB, split_population
from d2pfed.cli import options
from d2pfed.cli.show import delta_as_given, epsilons, err, headline, out, print_json
from d2pfed.errors import ConfigError
from d2pfed.fields import PRIVACY, check_range, convert
from d2pfed.plan import PrivacyTarget, Protocol, calibrate, describe, record_terms
from d2pfed.plan.bounds import MOST_POPULATION, MOST_ROUNDS
from d2pfed.plan.policy import default_refusal

plan_app, account_app = options.application(), options.application()

DEFAULT_JOB = {"population": 100_000, "cohort_size": 1000, "rounds": 50, "dimension": 19_354}  # of `d2pfed train`
FIELDS = options.FieldOptions(
    kind=PrivacyTarget,
    defaults=options.TARGET_DEFAULTS | DEFAULT_JOB | {"cohort_size": None, "rounds": None},
    unset={
        "cohort_size": "1,000 of 100,000 clients, else what the population allows",
        "rounds": "50 for 100,000 clients, else what the population allows",
    },
)
SETTING = options.FieldOptions(
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
MOST_DIMENSION, MOST_TRIALS, MOST_LEVELS = 1 << 31, 1 << 53, 1 << 31
LEAST_MULTIPLIER, MOST_MULTIPLIER = 1e-3, 1e6


@plan_app.command(cls=options.SectionedCommand)
@options.with_fields(FIELDS)
def plan(wanted: dict[str, Any], *, json: options.AsJson = False) -> None:
    """Show what a privacy target requires: noise, bits, bytes, error, and an epsilon for each observer."""
    if wanted["unit"] == Unit.RECORD:
        wanted["cohort_size"] = wanted["population"]  # every silo is asked
        if wanted["sampling"] == options.TARGET_DEFAULTS["sampling"]:
            wanted["sampling"] = Sampling.NONE
    missing = [name for name in ("cohort_size", "rounds") if wanted[name] is None]
    is_default_job = len(missing) == 2 and all(
        wanted[name] == DEFAULT_JOB[name] for name in ("population", "dimension")
    )
    if is_default_job and wanted["compression"] == options.TARGET_DEFAULTS["compression"]:
        wanted["compression"] = MAIN_JOB["compression"]
    own = wanted["population"] != DEFAULT_JOB["population"] and len(missing) == 2
    if own and wanted["sampling"] == Sampling.ONCE:  # chosen as in `train`
        target = PrivacyTarget(**wanted)
        rounds, cohort_size, why = split_population(target, None, None)
        err().print(why)
        target = replace(target, rounds=rounds, cohort_size=cohort_size)
    else:
        target = PrivacyTarget(**wanted | {name: DEFAULT_JOB[name] for name in missing})
    agreed = calibrate(target)
    summary = describe(target, agreed)
    if json:
        sent = {"vector_bytes": summary.upload_bytes, "upload_bytes": None, "download_bytes": None}
        if summary.traffic is not None:  # keys and shares included
            whole = summary.traffic.client
            sent |= {"upload_bytes": whole.sent, "download_bytes": whole.received}
        spent = {
            "epsilon": {str(item.observer): item.epsilon for item in summary.guarantees},
            "delta": agreed.delta,
        }
        kept = {"guarantees": summary.guarantees, "against": summary.against}
        print_json(asdict(summary) | kept | sent | spent | {"options": target})
        return
    from rich.table import Table  # noqa: PLC0415 - slow to load, and JSON needs no table

    # What is sent and received is all messages of an attempt in which nobody drops out.
    traffic = [("protocol", str(summary.protocol or "none: simulations of the sum only"))]
    if summary.traffic is not None:
        parts = {"a client": summary.traffic.client, "a member of the committee": summary.traffic.member}
        for who, each in parts.items():
            if each is not None:
                traffic.append((f"{who} sends", f"{each.sent:,} bytes per attempt"))
                traffic.append((f"{who} receives", f"{each.received:,} bytes per attempt, the model included"))
        if summary.traffic.roster:
            traffic.append(("roster", f"{summary.traffic.roster:,} bytes, once"))
    opens_secrets = summary.protocol in (Protocol.PAIRWISE, Protocol.LATTICE)
    table = Table(title="The plan", title_justify="left", show_header=False)
    for name, value in (
        ("noise on the sum (sigma)", f"{summary.sigma:.5g}"),
        ("noise multiplier", f"{summary.noise_multiplier:.4f}"),
        ("bits per coordinate", f"{summary.bits}"),
        ("vector per client per round", f"{summary.upload_bytes:,} bytes for {agreed.dimension:,} parameters"),
        *traffic,
        ("chance that a sum wraps", f"at most {round_up(summary.wrap_probability, 2)} per round"),
        ("error against a trusted server", f"{100 * (summary.relative_error - 1):+.2f} %"),
        ("noise in the mean over the clip", f"{summary.noise_to_clip:.3g}"),
        ("agreeing updates over noise", f"{summary.signal_to_noise:.2g} after all rounds"),
        ("attempts that may be charged", f"{summary.max_attempts}"),
        ("colluders in a cohort", f"at most {summary.colluders}"),
        *([("shares that open a secret", f"{summary.threshold}")] if opens_secrets else []),
        *([("bits of security", f"{summary.security_bits}")] if summary.security_bits else []),
    ):
        table.add_row(name, value)
    out().print(headline(summary.guarantees, summary.against))
    out().print(table)
    for reason in (
        summary.why_noise,
        summary.why_bits,
        summary.why_compression,
        summary.why_bytes,
        summary.why_protocol,
        summary.why_colluders,
    ):
        out().print(reason)
    out().print(epsilons(summary.guarantees))
    for warning in (*summary.warnings, *filter(None, [default_refusal(target, agreed)])):
        out().print(f"Warning: {warning}")
    for term in record_terms(agreed):
        out().print(term)


class Name(StrEnum):
    """The accountants by name."""

    WBK_MIRONOV = "wbk-mironov"
    WBK = "wbk"
    RDP = "rdp"
    PLD = "pld"
    BINOMIAL = "binomial"


@account_app.command(cls=options.SectionedCommand)
@options.with_fields(SETTING)
def account(
    setting: dict[str, Any],
    *,
    noise_multiplier: Annotated[
        float | None, options.option("Sigma over the sensitivity of the stated adjacency.", PRIVACY)
    ] = None,
    accountant: Annotated[
        Name, options.option("wbk-mironov is the paper's; binomial is cpSGD's. Default: pld.", PRIVACY)
    ] = Name.PLD,
    trials: Annotated[
        int | None, options.option("binomial: number of fair coins in the whole sum.", PRIVACY)
    ] = None,
    levels: Annotated[int | None, options.option("binomial: number of quantisation levels.", PRIVACY)] = None,
    delta_per_round: Annotated[
        float, options.option("binomial: failure probability of one round. Default: 1e-06.", PRIVACY)
    ] = 1e-6,
    json: options.AsJson = False,
) -> None:
    """Show the epsilon that given noise, sampling and rounds amount to."""
    setting = convert(PrivacyTarget, setting | {"adjacency": setting["adjacency"] or Adjacency.REPLACE_ONE})
    population, cohort, rounds = setting["population"], setting["cohort_size"], setting["rounds"]
    sampling, adjacency, delta = setting["sampling"], setting["adjacency"], setting["delta"]
    if adjacency is Adjacency.ADD_REMOVE:
        raise ConfigError("adjacency add-remove is of records (`d2pfed plan --unit record`), this is of clients")
    drawn = CohortSampling(sampling, population, cohort)
    for name, value, least, most in (
        ("population", population, 1, MOST_POPULATION),
        ("rounds", rounds, 1, MOST_ROUNDS),
        ("dimension", setting["dimension"], 1, MOST_DIMENSION),
        ("trials", 1 if trials is None else trials, 1, MOST_TRIALS),
        ("levels", 2 if levels is None else levels, 2, MOST_LEVELS),
    ):
        check_range(name, value, least, most)
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
            dimension=setting["dimension"],
            rate=cohort / population,
            rounds=rounds,
            delta=delta,
            delta_per_round=delta_per_round,
        )
    else:
        if noise_multiplier is None:
            raise ConfigError(f"the accountant {accountant} needs --noise-multiplier")
        by = Accountant(accountant.value)
        epsilon = epsilon_of(noise_multiplier, drawn, rounds, adjacency=adjacency, delta=delta, accountant=by)
    if not math.isfinite(epsilon):
        raise ConfigError(f"this noise keeps no epsilon at delta {delta:g}: {accountant} finds it infinite")
    if json:
        stated = {name: setting[name] for name in ("adjacency", "sampling", "population", "cohort_size", "rounds")}
        noise = {"noise_multiplier": noise_multiplier, "trials": trials, "levels": levels}
        print_json({"epsilon": epsilon, "delta": delta, "accountant": accountant} | stated | noise)
    else:
        out().print(
            f"epsilon {round_up(epsilon, 7)} at delta {delta_as_given(delta)} by {accountant}: {rounds} rounds of "
            f"{cohort} in {population} clients, {sampling}, {adjacency}, one client"
        )
