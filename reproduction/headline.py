"""Figure 1: accuracy against epsilon, and against megabytes, from the same runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from d2pfed.plan import Plan
from reproduction.as_coded import CodeNoise
from reproduction.curves import Hue, Line, Panel, PaperMark, XScale, draw_panels
from reproduction.folds import folded
from reproduction.history import RunHistory
from reproduction.presentation import (
    compared,
    guessing,
    level_line,
    published_line,
    records,
    seeds_of,
    spoken,
    spoken_number,
    table_of,
    true_line,
)
from reproduction.published import (
    CIFAR10,
    CPSGD_END,
    D2PFED_END,
    INFIMNIST,
    PLAIN_END,
    EndPoint,
    Experiment,
)
from reproduction.result import Context, Result, Table
from reproduction.runs import run_systems
from reproduction.systems import System, as_coded, cpsgd, d2pfed, fedavg, ours_at_epsilon_of
from reproduction.workload import Workload, reductions

_BOTH = (INFIMNIST, CIFAR10)
AS_CODED = (CodeNoise.GAUSS, CodeNoise.COINS, CodeNoise.NONE)
_FOLDED = (8, 32)  # parts of the numbers
NORM_ONE = ", norm 1"  # the authors' code scales an update that is longer than D to norm 1, not to D


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs behind both halves of the figure, for one experiment."""

    d2pfed: RunHistory
    norm_one: RunHistory
    cpsgd: RunHistory
    fedavg: RunHistory
    ours: RunHistory  # at the true epsilon of `d2pfed`
    folded: tuple[RunHistory, ...] = ()  # the same with fewer numbers, where that was run
    coded: tuple[
        RunHistory, ...
    ] = ()  # D2P-Fed, cpSGD and FedAvg as the authors' code ran them, where that was run

    @property
    def all(self) -> tuple[RunHistory, ...]:
        """All of them, in the order of the tables."""
        return self.d2pfed, self.norm_one, self.cpsgd, self.fedavg, self.ours, *self.folded, *self.coded


def systems(workload: Workload) -> tuple[System, ...]:
    """Return what the figure runs of one experiment."""
    main = d2pfed(workload)
    ours = ours_at_epsilon_of(main)
    return (
        main,
        d2pfed(workload, clip=1.0, note=NORM_ONE),
        cpsgd(workload),
        fedavg(workload),
        ours,
        *(folded(ours, part) for part in _FOLDED if workload.is_mlp),
        *(as_coded(workload, noise) for noise in AS_CODED if workload.is_mlp),
    )


def make_fig1a(context: Context) -> Result:
    """Return accuracy against epsilon."""
    return fig1a(_workloads(context), context)


def make_fig1b(context: Context) -> Result:
    """Return accuracy against megabytes, from the runs of fig1a."""
    return fig1b(_workloads(context), context)


def _workloads(context: Context) -> list[Workload]:
    return [Workload.load(experiment, context) for experiment in _BOTH if context.only in (None, experiment.task)]


def _reduced(workloads: Sequence[Workload], context: Context) -> str:
    shown = {workload.experiment.name for workload in workloads}
    parts = [reductions(context, *(each for each in _BOTH if each.name in shown))]
    return "; ".join(
        [part for part in parts if part] + [f"no {each.name}" for each in _BOTH if each.name not in shown]
    )


def fig1a(workloads: Sequence[Workload], context: Context) -> Result:
    """Run all systems in these workloads, and show them by epsilon."""
    found = _run(workloads, context)
    return Result(
        name="fig1a",
        title="Figure 1a: accuracy against epsilon",
        table=_table(found),
        words=tuple(sentence for runs in found for sentence in _words_epsilon(runs)),
        ran=records([curve for runs in found for curve in runs.all]),
        reduced=_reduced(workloads, context),
        draw=partial(draw_panels, panels=[_epsilon_panel(runs) for runs in found]),
    )


def fig1b(workloads: Sequence[Workload], context: Context) -> Result:
    """Run all systems in these workloads, and show them by bytes."""
    found = _run(workloads, context)
    return Result(
        name="fig1b",
        title="Figure 1b: accuracy against communication",
        table=_table(found),
        words=tuple(_words_bytes(runs) for runs in found),
        ran=records([curve for runs in found for curve in runs.all]),
        reduced=_reduced(workloads, context),
        draw=partial(draw_panels, panels=[_megabyte_panel(runs) for runs in found]),
    )


def _run(workloads: Sequence[Workload], context: Context) -> list[Runs]:
    every = [systems(workload) for workload in workloads]
    curves = iter(run_systems([system for some in every for system in some], context))
    found = [[next(curves) for _ in some] for some in every]
    ends = [5 + len(_FOLDED) * some[0].workload.is_mlp for some in every]
    return [
        Runs(*_five(each), tuple(each[5:end]), tuple(each[end:])) for each, end in zip(found, ends, strict=True)
    ]


def _five(found: Sequence[RunHistory]) -> tuple[RunHistory, RunHistory, RunHistory, RunHistory, RunHistory]:
    one, two, three, four, five = found[:5]
    return one, two, three, four, five


def _table(found: list[Runs]) -> Table:
    pairs: list[tuple[RunHistory, EndPoint | None]] = []
    for runs in found:
        name, sigma = _experiment(runs).name, _experiment(runs).sigma
        main, rival, plain = D2PFED_END[name, sigma], CPSGD_END[name], PLAIN_END[name]
        none = (None,) * (1 + len(runs.folded))
        pairs += zip(runs.all, (main, main, rival, plain, *none, main, rival, plain), strict=False)
    return table_of(pairs)


def _experiment(runs: Runs) -> Experiment:
    return runs.d2pfed.system.workload.experiment


def _epsilon_panel(runs: Runs) -> Panel:
    ends = [
        (D2PFED_END[_experiment(runs).name, _experiment(runs).sigma], Hue.D2PFED),
        (CPSGD_END[_experiment(runs).name], Hue.CPSGD),
    ]
    return Panel(
        title=_experiment(runs).name,
        xlabel="epsilon (delta 1e-5)",
        scale=XScale.EPSILON,
        lines=(
            published_line(runs.d2pfed, Hue.D2PFED, "D2P-Fed, as published"),
            true_line(runs.d2pfed, Hue.D2PFED, "D2P-Fed, true epsilon"),
            published_line(runs.norm_one, Hue.NORM_ONE, "D2P-Fed, norm 1, as published"),
            true_line(runs.norm_one, Hue.NORM_ONE, "D2P-Fed, norm 1, true epsilon"),
            published_line(runs.cpsgd, Hue.CPSGD, "cpSGD, as published"),
            true_line(runs.cpsgd, Hue.CPSGD, "cpSGD, true epsilon"),
            true_line(runs.ours, Hue.OURS, "ours, at D2P-Fed's true epsilon"),
            level_line(runs.fedavg, Hue.PLAIN, "not private"),
            *(
                published_line(curve, Hue.CODE, "D2P-Fed, as the code ran, as published")
                for curve in runs.coded[:1]
            ),
        ),
        marks=tuple(PaperMark(end.epsilon, end.accuracy, hue) for end, hue in ends if end.epsilon is not None),
    )


def _megabyte_panel(runs: Runs) -> Panel:
    named = (
        (runs.d2pfed, Hue.D2PFED, "D2P-Fed, 2 bytes"),
        (runs.norm_one, Hue.NORM_ONE, "D2P-Fed, norm 1, 2 bytes"),
        (runs.cpsgd, Hue.CPSGD, "cpSGD, 3 bytes"),
        (runs.ours, Hue.OURS, "ours, at D2P-Fed's true epsilon"),
        (runs.fedavg, Hue.PLAIN, "not private, 4 bytes"),
        *(
            (curve, hue, f"ours, 1/{_share(curve):.0f} of the numbers")
            for curve, hue in zip(runs.folded, (Hue.FIFTH, Hue.SIXTH), strict=False)
        ),
    )
    experiment = _experiment(runs)
    last = {
        Hue.D2PFED: (D2PFED_END[experiment.name, experiment.sigma], runs.d2pfed),
        Hue.CPSGD: (CPSGD_END[experiment.name], runs.cpsgd),
        Hue.PLAIN: (PLAIN_END[experiment.name], runs.fedavg),
    }
    return Panel(
        title=experiment.name,
        xlabel="MB sent by a client that is in every round",
        lines=tuple(
            Line(label=label, hue=hue, xs=curve.megabytes, ys=curve.validation, band=curve.band, tests=curve.tests)
            for curve, hue, label in named
        ),
        marks=tuple(PaperMark(curve.megabytes[-1], end.accuracy, hue) for hue, (end, curve) in last.items()),
    )


def _words_epsilon(runs: Runs) -> tuple[str, ...]:
    experiment, main, loud, ours, rival = _experiment(runs), runs.d2pfed, runs.norm_one, runs.ours, runs.cpsgd
    paper = D2PFED_END[experiment.name, experiment.sigma]
    first = (
        f"{experiment.name}: by the paper's accounting D2P-Fed's epsilon is {spoken_number(main.published[-1])}. With "
        f"every update clipped to D = {experiment.clip:g} it truly is {spoken_number(main.released[-1])} for who sees "
        f"the released models, and {_server(main)} for the server, against which all rounds count, as there is no cap "
        f"on participations. The accuracy is {spoken(main)}{guessing(main)} against {paper.spoken}."
    )
    second = (
        f"Updates of norm 1, which the authors' code lets through, give {spoken(loud)}{guessing(loud)} at a true "
        f"epsilon of {spoken_number(loud.released[-1])} for the released models; ours {spoken(ours)}{guessing(ours)} "
        f"at {spoken_number(ours.released[-1])}; cpSGD {spoken(rival)}{guessing(rival)} at "
        f"{spoken_number(rival.released[-1])} (as published: {spoken_number(rival.published[-1])}); FedAvg without "
        f"privacy {spoken(runs.fedavg)}. {seeds_of(runs.all)}"
    )
    if not runs.coded:
        return first, second
    code, coins, plain = runs.coded
    third = (
        f"As the authors' code ran (one Adam for all clients and rounds, cohorts with replacement, updates of norm 1, "
        f"pixels up to 827): D2P-Fed {spoken(code)} against {paper.spoken}, cpSGD {spoken(coins)} against "
        f"{CPSGD_END[experiment.name].spoken}, without noise {spoken(plain)} against "
        f"{PLAIN_END[experiment.name].spoken}. No epsilon holds for these runs: see the erratum on carried moments."
    )
    return first, second, third


def _server(curve: RunHistory) -> str:
    return "none" if curve.server is None else spoken_number(curve.server)


def _share(curve: RunHistory) -> float:
    """Return how many parameters go into one number that is sent."""
    plan = curve.system.work
    return plan.dimension / plan.codec.length if isinstance(plan, Plan) else 1.0


def _words_bytes(runs: Runs) -> str:
    shown = ", ".join(
        f"{name} {spoken(curve)}{guessing(curve)} for {spoken_number(curve.megabytes[-1])} MB"
        for name, curve in (
            ("ours", runs.ours),
            *((f"ours at 1/{_share(curve):.0f} of the numbers", curve) for curve in runs.folded),
            ("D2P-Fed", runs.d2pfed),
            ("cpSGD", runs.cpsgd),
            ("not private", runs.fedavg),
        )
    )
    return (
        f"{_experiment(runs).name}: {shown}. {seeds_of(runs.all)} The paper ranks D2P-Fed above cpSGD for fewer bytes; "
        f"here its accuracy is {compared(runs.d2pfed, runs.cpsgd, 'that of cpSGD')}. Bytes include the rotation's "
        f"padding, which the paper leaves out."
    )
