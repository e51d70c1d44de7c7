"""An experiment with its data and model loaded, in the size that is run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from d2pfed.learning import Examples, LocalTraining, Model, Task, build_model, load_task, parse_partition
from d2pfed.learning.dense import widths_of
from reproduction.explicit import PAPER_LOCAL
from reproduction.published import Experiment
from reproduction.raw_pixels import on_raw_pixels
from reproduction.result import Context, Size

_QUICK_ROUNDS = {"INFIMNIST": 20, "CIFAR10": 10}
_QUICK_EPOCHS = 2
_QUICK_MODEL = {"CIFAR10": "small-cnn"}
_VALIDATION = {"CIFAR10": 1_000}  # images that a curve is of: more would take longer than the training


@dataclass(frozen=True, slots=True)
class Workload:
    """An experiment with its data and model loaded, in the size that is run."""

    experiment: Experiment
    task: Task = field(repr=False)
    model: Model = field(repr=False)
    partition: str
    local: LocalTraining  # of the paper's systems
    initial: Callable[[int], Model] = field(repr=False)  # from a number to the model in that initial state

    @staticmethod
    def load(experiment: Experiment, context: Context, partition: str = "iid") -> "Workload":
        """Load what the experiment trains, from the context's data directory."""
        local = PAPER_LOCAL
        if context.size is Size.QUICK:
            name = _QUICK_MODEL.get(experiment.name, experiment.model)
            experiment = replace(experiment, rounds=_QUICK_ROUNDS[experiment.name], model=name)
            local = replace(local, epochs=_QUICK_EPOCHS)
        task = load_task(
            experiment.task,
            population=experiment.population,
            partition=parse_partition(partition),
            data_dir=context.data,
        )
        if (kept := _VALIDATION.get(experiment.name)) is not None:
            few = task.validation.take(np.arange(kept))
            few = Examples(few.inputs.contiguous(memory_format=torch.channels_last), few.labels)  # as fast again
            words = f"{task.description} Curves are of {kept:,} validation images."
            task = replace(task, validation=few, description=words)
        initial = partial(build_model, experiment.model, task)
        model = initial(0)
        return Workload(replace(experiment, dimension=model.dimension), task, model, partition, local, initial)

    @property
    def is_mlp(self) -> bool:
        """Whether the authors' loop can be run for the model."""
        return widths_of(self.model) is not None

    def with_raw_pixels(self) -> "Workload":
        """Return the same with pixels as the authors' code takes them."""
        name = f"{self.experiment.model} on raw pixels"
        return replace(
            self,
            experiment=replace(self.experiment, model=name),
            model=on_raw_pixels(self.model),
            initial=lambda number: on_raw_pixels(self.initial(number)),
        )


def reductions(context: Context, *experiments: Experiment) -> str:
    """Say what a quick result leaves out of these experiments; nothing of a full one."""
    if context.size is Size.FULL:
        return ""
    parts = [f"{_QUICK_ROUNDS[each.name]} rounds for {each.rounds} on {each.name}" for each in experiments]
    parts.append(f"{_QUICK_EPOCHS} local epochs for {PAPER_LOCAL.epochs} in the paper's systems")
    parts += [
        f"a model of 16,618 parameters for {each.dimension:,} on {each.name}"
        for each in experiments
        if each.name in _QUICK_MODEL
    ]
    return "; ".join(parts)
