"""What folding costs the benchmarks: accuracy at a half, an eighth and a 32nd of the numbers, beside all of them."""

import math
from dataclasses import replace
from functools import partial

import torch
from matplotlib.figure import Figure
from torch import nn

from d2pfed.learning import Model, load_task
from d2pfed.plan import Plan, calibrate
from d2pfed.plan.target import USUAL_LONGEST_MEAN
from d2pfed.runs.report.plots import Ink
from reproduction.comparisons import WHOLE_CIFAR, WRITERS, Benchmark, system_of
from reproduction.curves import Hue, style_axes
from reproduction.explicit import local_training, server_optimizer
from reproduction.history import RunHistory
from reproduction.presentation import accuracy_cells, records, seeds_of, spoken
from reproduction.result import Cell, Context, Result, Table
from reproduction.runs import run_systems
from reproduction.systems import System

CNN = Benchmark(
    name="cnn",
    title="A convolutional network on deformed digits",
    load=lambda context: load_task("infimnist", data_dir=context.data),
    model=lambda task, seed: convolutional(task.classes, seed),
    model_name="two convolutions and two layers",
    epsilon=8.0,
    cohort_size=500,
    rounds=20,
    local=local_training(lr=0.1, batch_size=10),
    step=server_optimizer(lr=1.0, momentum=0.7, averaging=0.5),
)
_PARTS = {"writers": (2, 8, 32), "cifar10-server": (2, 8, 32), "cnn": (50,)}
_COLUMNS = (
    *("benchmark", "epsilon, server", "parameters", "numbers", "bits", "bytes of the vector"),
    *("accuracy", "lowest", "highest", "seeds"),
)
_MARKS = {"writers": (Hue.OURS, "o"), "cifar10-server": (Hue.D2PFED, "s"), "cnn": (Hue.CPSGD, "D")}


def convolutional(classes: int, seed: int) -> Model:
    """Return a network of 206,922 parameters for ten kinds of 28 x 28 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        front = [
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        ]
        return Model(nn.Sequential(*front, nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, classes)))


def folded(system: System, length: int) -> System:
    """Return the same system with vectors of so many numbers, and the bits that a mean of half the clip takes."""
    target = replace(system.target, compression=length, longest_mean=USUAL_LONGEST_MEAN)
    name, label = f"{system.name}-folded-{length}", f"{system.label}, folded to {length:,}"
    return replace(system, name=name, label=label, target=target, work=calibrate(target))


def make(context: Context) -> Result:
    """Return accuracy by how many numbers a client sends."""
    systems = []
    for benchmark in (WRITERS, WHOLE_CIFAR, CNN):
        whole = system_of(benchmark, benchmark.load(context))
        lengths = [1 << round(math.log2(whole.workload.model.dimension / part)) for part in _PARTS[benchmark.name]]
        systems += [whole, *(folded(whole, length) for length in lengths)]
    found = run_systems(systems, context)
    return Result(
        name="folds",
        title="What folding costs the benchmarks",
        table=Table(_COLUMNS, tuple(_row(each) for each in found)),
        words=_words(found),
        ran=records(found),
        draw=partial(_draw, found=found),
    )


def _row(each: RunHistory) -> tuple[Cell, ...]:
    system, plan = each.system, each.system.work
    if not isinstance(plan, Plan):
        raise TypeError("a benchmark's private system has a plan")
    experiment = system.workload.experiment
    numbers = plan.codec.length
    return (
        experiment.name,
        system.target.epsilon,
        plan.dimension,
        numbers,
        system.bits,
        system.upload_bytes,
        *accuracy_cells(each),
    )


def _words(found: list[RunHistory]) -> tuple[str, ...]:
    told = [
        f"{each.system.workload.experiment.name}, {each.system.label}: {spoken(each)} for "
        f"{each.system.upload_bytes:,} bytes"
        for each in found
    ]
    why = "`auto` folds neither writers nor CIFAR-10: the mean is long beside the noise at epsilon 8."
    return (f"{'; '.join(told)}. {seeds_of(found)} {why}",)


def _draw(figure: Figure, found: list[RunHistory]) -> None:
    axes = figure.subplots()
    for name, (hue, mark) in _MARKS.items():
        own = [each for each in found if each.system.workload.experiment.name == name]
        if own:
            sizes, ends = [each.system.upload_bytes for each in own], [each.test for each in own]
            axes.plot(sizes, ends, f"{mark}-", color=hue, label=name)
            low, high = zip(*(each.spread for each in own), strict=True)
            axes.vlines(sizes, low, high, color=hue)
    axes.set_xscale("log")
    axes.set_xlabel("bytes of a client's vector in a round", color=Ink.TEXT)
    axes.set_ylabel("test accuracy, %", color=Ink.TEXT)
    axes.legend(frameon=False)
    style_axes(axes)
