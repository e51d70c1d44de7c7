"""What folding costs benchmarks: accuracy at a half, an eighth and a 32nd of the numbers, beside all of them."""

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
_COLUMNS = (
    *("benchmark", "epsilon, server", "parameters", "numbers", "bits", "bytes of the vector"),
    *("accuracy", "lowest", "highest", "seeds"),
)


def convolutional(classes: int, seed: int) -> Model:
    """Return a network of 206,922 parameters for ten kinds of 28 x 28 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        front = [
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        ]
        return Model(nn.Sequential(*front, nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, classes)))


def folded(system: System, part: int) -> System:
    """Return the same system with this part of the numbers, a power of two, and bits for a mean of half a clip."""
    length = 1 << round(math.log2(system.workload.model.dimension / part))
    target = replace(system.target, compression=length, longest_mean=USUAL_LONGEST_MEAN)
    name, label = f"{system.name}-folded-{length}", f"{system.label}, folded to {length:,}"
    return replace(system, name=name, label=label, target=target, work=calibrate(target))


def make_writers(context: Context) -> Result:
    """Return accuracy over the writers of MNIST by how many numbers a client sends."""
    return by_numbers(WRITERS, (2, 8, 32), context)


def make_cifar(context: Context) -> Result:
    """Return the same on whole images of CIFAR-10."""
    return by_numbers(WHOLE_CIFAR, (2, 8, 32), context)


def make_cnn(context: Context) -> Result:
    """Return the same of a convolutional network."""
    return by_numbers(CNN, (50,), context)


def by_numbers(benchmark: Benchmark, parts: tuple[int, ...], context: Context) -> Result:
    """Run a benchmark whole and with these parts of its numbers."""
    whole = system_of(benchmark, benchmark.load(context))
    found = run_systems([whole, *(folded(whole, part) for part in parts)], context)
    return Result(
        name=f"folds-{benchmark.name}",
        title=f"{benchmark.title}: accuracy by the numbers sent",
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
    return (f"{'; '.join(told)}. {seeds_of(found)}",)


def _draw(figure: Figure, found: list[RunHistory]) -> None:
    axes = figure.subplots()
    sizes, ends = [each.system.upload_bytes for each in found], [each.test for each in found]
    axes.plot(sizes, ends, "o-", color=Hue.OURS)
    low, high = zip(*(each.spread for each in found), strict=True)
    axes.vlines(sizes, low, high, color=Hue.OURS)
    axes.set_xscale("log")
    axes.set_xlabel("bytes of a client's vector in a round", color=Ink.TEXT)
    axes.set_ylabel("test accuracy, %", color=Ink.TEXT)
    style_axes(axes)
