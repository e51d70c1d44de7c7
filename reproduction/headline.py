"""Figure 1: accuracy against epsilon, and against megabytes, from the same runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from reproduction.curves import Across, Hue, Panel, PaperMark, Trace, draw_panels
from reproduction.exhibit import Exhibit, Place, Table
from reproduction.published import (
    CIFAR10,
    CPSGD_END,
    D2PFED_END,
    INFIMNIST,
    PLAIN_END,
    EndPoint,
    Experiment,
)
from reproduction.readings import level_trace, published_trace, records, table_of, true_trace
from reproduction.runs import Curve, carry_out
from reproduction.systems import Scene, System, beside, cpsgd, d2pfed, fedavg, reductions

_BOTH = (INFIMNIST, CIFAR10)
_CHANCE = 1.0  # points of accuracy that two runs may differ by for no reason
NORM_ONE = ", norm 1"  # the authors' code scales an update that is longer than D to norm 1, not to D


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs behind both halves of the figure, for one experiment."""

    d2pfed: Curve
    norm_one: Curve
    cpsgd: Curve
    fedavg: Curve
    ours: Curve  # at the true epsilon of `d2pfed`

    @property
    def all(self) -> tuple[Curve, ...]:
        """All of them, in the order of the tables."""
        return self.d2pfed, self.norm_one, self.cpsgd, self.fedavg, self.ours


def systems(scene: Scene) -> tuple[System, ...]:
    """Return what the figure runs of one experiment."""
    main = d2pfed(scene)
    return main, d2pfed(scene, clip=1.0, note=NORM_ONE), cpsgd(scene), fedavg(scene), beside(main)


def make_fig1a(place: Place) -> Exhibit:
    """Return accuracy against epsilon."""
    return fig1a(_scenes(place), place)


def make_fig1b(place: Place) -> Exhibit:
    """Return accuracy against megabytes, from the runs of fig1a."""
    return fig1b(_scenes(place), place)


def _scenes(place: Place) -> list[Scene]:
    return [Scene.load(experiment, place) for experiment in _BOTH if place.only in (None, experiment.task)]


def _reduced(scenes: Sequence[Scene], place: Place) -> str:
    shown = {scene.experiment.name for scene in scenes}
    parts = [reductions(place, *(each for each in _BOTH if each.name in shown))]
    return "; ".join(
        [part for part in parts if part] + [f"no {each.name}" for each in _BOTH if each.name not in shown]
    )


def fig1a(scenes: Sequence[Scene], place: Place) -> Exhibit:
    """Run all systems in these scenes, and show them by epsilon."""
    found = _run(scenes, place)
    return Exhibit(
        name="fig1a",
        title="Figure 1a: accuracy against epsilon",
        table=_table(found),
        words=tuple(sentence for runs in found for sentence in _words_epsilon(runs)),
        ran=records([curve for runs in found for curve in runs.all]),
        reduced=_reduced(scenes, place),
        draw=partial(draw_panels, panels=[_epsilon_panel(runs) for runs in found]),
    )


def fig1b(scenes: Sequence[Scene], place: Place) -> Exhibit:
    """Run all systems in these scenes, and show them by bytes."""
    found = _run(scenes, place)
    return Exhibit(
        name="fig1b",
        title="Figure 1b: accuracy against communication",
        table=_table(found),
        words=tuple(_words_bytes(runs) for runs in found),
        ran=records([curve for runs in found for curve in runs.all]),
        reduced=_reduced(scenes, place),
        draw=partial(draw_panels, panels=[_megabyte_panel(runs) for runs in found]),
    )


def _run(scenes: Sequence[Scene], place: Place) -> list[Runs]:
    every = [systems(scene) for scene in scenes]
    curves = iter(carry_out([system for some in every for system in some], place))
    return [Runs(*(next(curves) for _ in some)) for some in every]


def _table(found: list[Runs]) -> Table:
    pairs: list[tuple[Curve, EndPoint | None]] = []
    for runs in found:
        name, sigma = _experiment(runs).name, _experiment(runs).sigma
        ends = (D2PFED_END[name, sigma], D2PFED_END[name, sigma], CPSGD_END[name], PLAIN_END[name], None)
        pairs += zip(runs.all, ends, strict=True)
    return table_of(pairs)


def _experiment(runs: Runs) -> Experiment:
    return runs.d2pfed.system.scene.experiment


def _epsilon_panel(runs: Runs) -> Panel:
    ends = [
        (D2PFED_END[_experiment(runs).name, _experiment(runs).sigma], Hue.D2PFED),
        (CPSGD_END[_experiment(runs).name], Hue.CPSGD),
    ]
    return Panel(
        title=_experiment(runs).name,
        across="epsilon (delta 1e-5)",
        scale=Across.EPSILON,
        traces=(
            published_trace(runs.d2pfed, Hue.D2PFED, "D2P-Fed, as published"),
            true_trace(runs.d2pfed, Hue.D2PFED, "D2P-Fed, true epsilon"),
            published_trace(runs.norm_one, Hue.NORM_ONE, "D2P-Fed, norm 1, as published"),
            true_trace(runs.norm_one, Hue.NORM_ONE, "D2P-Fed, norm 1, true epsilon"),
            published_trace(runs.cpsgd, Hue.CPSGD, "cpSGD, as published"),
            true_trace(runs.cpsgd, Hue.CPSGD, "cpSGD, true epsilon"),
            true_trace(runs.ours, Hue.OURS, "ours, at D2P-Fed's true epsilon"),
            level_trace(runs.fedavg, Hue.PLAIN, "not private"),
        ),
        marks=tuple(PaperMark(end.epsilon, end.accuracy, hue) for end, hue in ends if end.epsilon is not None),
    )


def _megabyte_panel(runs: Runs) -> Panel:
    named = (
        (runs.d2pfed, Hue.D2PFED, "D2P-Fed, 2 bytes"),
        (runs.norm_one, Hue.NORM_ONE, "D2P-Fed, norm 1, 2 bytes"),
        (runs.cpsgd, Hue.CPSGD, "cpSGD, 3 bytes"),
        (runs.ours, Hue.OURS, "ours, at D2P-Fed's true epsilon, 1 byte"),
        (runs.fedavg, Hue.PLAIN, "not private, 4 bytes"),
    )
    experiment = _experiment(runs)
    last = {
        Hue.D2PFED: (D2PFED_END[experiment.name, experiment.sigma], runs.d2pfed),
        Hue.CPSGD: (CPSGD_END[experiment.name], runs.cpsgd),
        Hue.PLAIN: (PLAIN_END[experiment.name], runs.fedavg),
    }
    return Panel(
        title=experiment.name,
        across="MB sent by a client in every round",
        traces=tuple(
            Trace(label=label, hue=hue, xs=curve.megabytes, ys=curve.validation, test=curve.test)
            for curve, hue, label in named
        ),
        marks=tuple(PaperMark(curve.megabytes[-1], end.accuracy, hue) for hue, (end, curve) in last.items()),
    )


def _words_epsilon(runs: Runs) -> tuple[str, str]:
    experiment, main, loud, ours, rival = _experiment(runs), runs.d2pfed, runs.norm_one, runs.ours, runs.cpsgd
    paper = D2PFED_END[experiment.name, experiment.sigma]
    kept = "more" if main.released[-1] < main.published[-1] else "less"
    first = (
        f"{experiment.name}: D2P-Fed's epsilon comes out as {main.published[-1]:.4g} by the paper's accounting; with "
        f"every update clipped to D = {experiment.clip:g} the released models truly cost {main.released[-1]:.2g} and "
        f"the server learns {main.server or 0:.3g}, so to who sees the models alone the paper keeps {kept} than it "
        f"guarantees; the accuracy is {main.test:.1f} % (paper: {paper.accuracy:g} %)."
    )
    second = (
        f"Updates of norm 1, which the authors' code lets through, give {loud.test:.1f} % at a true epsilon of "
        f"{loud.released[-1]:.3g}; ours gives {ours.test:.1f} % at {ours.released[-1]:.2g}, cpSGD {rival.test:.1f} % "
        f"at {rival.released[-1]:.3g} (as published: {rival.published[-1]:.3g}), FedAvg without privacy "
        f"{runs.fedavg.test:.1f} %."
    )
    return first, second


def _words_bytes(runs: Runs) -> str:
    lead = runs.d2pfed.test - runs.cpsgd.test
    holds = (
        "holds"
        if lead > _CHANCE
        else "does not hold here"
        if lead < -_CHANCE
        else "cannot be told from chance here"
    )
    shown = ", ".join(
        f"{curve.megabytes[-1]:.3g} MB for {curve.test:.1f} % ({name})"
        for name, curve in (
            ("ours", runs.ours),
            ("D2P-Fed", runs.d2pfed),
            ("cpSGD", runs.cpsgd),
            ("not private", runs.fedavg),
        )
    )
    return (
        f"{_experiment(runs).name}: the paper's ranking, more accuracy than cpSGD for fewer bytes, {holds}: {shown}; "
        f"bytes include the rotation's padding, which the paper leaves out."
    )
