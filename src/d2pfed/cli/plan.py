"""`d2pfed plan`: what noise, bits, bytes and epsilons a privacy target requires."""

from dataclasses import asdict, replace
from typing import Any

from d2pfed.accounting import Sampling, Unit
from d2pfed.api.complete_target import split_population
from d2pfed.cli.options import (
    TARGET_DEFAULTS,
    AsJson,
    FieldOptions,
    SectionedCommand,
    application,
    with_fields,
)
from d2pfed.cli.show import err, out, print_json
from d2pfed.plan import Plan, PlanSummary, PrivacyTarget, calibrate, describe, record_terms
from d2pfed.plan.policy import default_refusal
from d2pfed.round import sketch_of
from d2pfed.secagg import upload_bytes

app = application()

DEFAULT_JOB = {"population": 100_000, "cohort_size": 1000, "rounds": 50, "dimension": 19_354}  # of `d2pfed train`
FIELDS = FieldOptions(
    kind=PrivacyTarget,
    defaults=TARGET_DEFAULTS | DEFAULT_JOB | {"cohort_size": None, "rounds": None},
    unset={
        "cohort_size": "1,000 of 100,000 clients, else what the population allows",
        "rounds": "50 for 100,000 clients, else what the population allows",
    },
)


@app.command(cls=SectionedCommand)
@with_fields(FIELDS)
def plan(wanted: dict[str, Any], *, json: AsJson = False) -> None:
    """Show what a privacy target requires: noise, bits, bytes, error, and an epsilon for each observer."""
    if wanted["unit"] == Unit.RECORD:
        wanted["cohort_size"] = wanted["population"]  # every silo is asked
        if wanted["sampling"] == TARGET_DEFAULTS["sampling"]:
            wanted["sampling"] = Sampling.NONE
    target = _filled(wanted)
    agreed = calibrate(target)
    summary = describe(target, agreed)
    upload = upload_bytes(sketch_of(agreed))  # keys and shares included
    if json:
        per_observer = {str(item.observer): item.epsilon for item in summary.guarantees}
        asked = {"options": target}
        bytes_sent = {"upload_bytes": upload, "vector_bytes": summary.upload_bytes}
        spent = {"epsilon": per_observer, "delta": agreed.delta}
        print_json(asdict(summary) | {"guarantees": summary.guarantees} | bytes_sent | spent | asked)
        return
    _print(summary, upload, agreed, default_refusal(target, agreed))
    for term in record_terms(agreed):
        out().print(term)


def _filled(wanted: dict[str, Any]) -> PrivacyTarget:
    """Return the target; rounds and cohorts of another population than the default job's are chosen as in `train`."""
    missing = [name for name in ("cohort_size", "rounds") if wanted[name] is None]
    own = wanted["population"] != DEFAULT_JOB["population"] and len(missing) == 2
    if not own or wanted["sampling"] != Sampling.ONCE:
        return PrivacyTarget(**wanted | {name: DEFAULT_JOB[name] for name in missing})
    target = PrivacyTarget(**wanted)
    rounds, cohort_size, why = split_population(target, None, None)
    err().print(why)
    return replace(target, rounds=rounds, cohort_size=cohort_size)


def _print(summary: PlanSummary, upload: int, plan: Plan, refusal: str) -> None:
    from rich.table import Table  # noqa: PLC0415 - slow to load, and JSON needs no table

    from d2pfed.accounting import round_up  # noqa: PLC0415
    from d2pfed.cli.show import epsilons, headline  # noqa: PLC0415

    table = Table(title="The plan", title_justify="left", show_header=False)
    for name, value in (
        ("noise on the sum (sigma)", f"{summary.sigma:.5g}"),
        ("noise multiplier", f"{summary.noise_multiplier:.4f}"),
        ("bits per coordinate", f"{summary.bits}"),
        ("vector per client per round", f"{summary.upload_bytes:,} bytes for {plan.dimension:,} parameters"),
        ("upload with keys and shares", f"{upload:,} bytes"),
        ("chance that a sum wraps", f"at most {round_up(summary.wrap_probability, 2)} per round"),
        ("error against a trusted server", f"{100 * (summary.relative_error - 1):+.2f} %"),
        ("noise in the mean over the clip", f"{summary.noise_to_clip:.3g}"),
        ("agreeing updates over noise", f"{summary.signal_to_noise:.2g} after all rounds"),
        ("attempts that may be charged", f"{summary.max_attempts}"),
        ("colluders in a cohort", f"at most {summary.colluders}"),
        ("neighbours, threshold, cut off", f"{summary.neighbours}, {summary.threshold}, {summary.cut_off}"),
    ):
        table.add_row(name, value)
    console = out()
    console.print(headline(summary.guarantees, plan.against))
    console.print(table)
    for reason in (summary.why_noise, summary.why_bits, summary.why_graph, summary.why_colluders):
        console.print(reason)
    console.print(epsilons(summary.guarantees))
    for warning in (*summary.warnings, *filter(None, [refusal])):
        console.print(f"Warning: {warning}")
