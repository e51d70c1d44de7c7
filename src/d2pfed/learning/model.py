"""Any torch module as one flat vector of the parameters that are trained, and how good it is on given examples."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning.losses import IGNORED, Accuracy, CrossEntropy, Losses, by_row, cross_entropy, seen_by
from d2pfed.learning.task import Examples, Tree, mapped

Module = nn.Module
Params = NDArray[np.float32]
Forward = Callable[[Module, Any], Any]  # from a module and inputs to outputs
Step = Callable[[Module, Any], torch.Tensor]  # from a module and a batch to its loss
Weigh = Callable[[Any, Any], torch.Tensor]  # from inputs and targets to a weight of each example
Metric = Callable[[Any, Any], Any]  # from all outputs and all targets to a number
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]

_EVALUATED = 100  # rows at once: what the layers pass on then stays in a core's cache


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A module that treats the rows of a batch one by one, which of its parameters are trained, and its loss.

    `trainable` holds names or patterns (`head.*`); what they leave out, and what does not require gradients, keeps
    its value and costs nothing. Shared parameters count once, under any of their names. Buffers never leave a
    client: each starts from the module's. `forward` says how the module is called, where inputs are not one tensor, a
    tuple of arguments or a dictionary of them. `step` takes the place of forward and loss. `weigh` gives each example
    a factor of its loss in training. Torch's losses see the logits of outputs that have some. Inputs that are a
    dictionary without targets have them under `labels`.
    """

    module: Module = field(repr=False)
    trainable: tuple[str, ...] = ("*",)
    losses: Losses = field(default=cross_entropy, repr=False)
    forward: Forward | None = field(default=None, repr=False)
    step: Step | None = field(default=None, repr=False)
    device: torch.device = CPU
    weigh: Weigh | None = field(default=None, repr=False)
    names: tuple[str, ...] = field(init=False)
    dimension: int = field(init=False)
    training: Module = field(init=False, repr=False)  # the module in training mode
    scoring: Module = field(init=False, repr=False)  # and in evaluation mode, of the same tensors

    def __post_init__(self) -> None:
        own = _copy_to(self.device, self.module)
        # Of a parameter with several names the first is chosen.
        aliases, values, patterns = dict[int, list[str]](), dict(own.named_parameters()), self.trainable
        for name, value in own.named_parameters(remove_duplicate=False):
            if value.requires_grad:
                aliases.setdefault(id(value), []).append(name)
        known = [name for group in aliases.values() for name in group]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                some = ", ".join(known[:6]) + ", ..." * (len(known) > 6)
                raise ConfigError(
                    f"trainable must name parameters that require gradients, {pattern!r} names none of {some or 'none'}"
                )
        names = tuple(n[0] for n in aliases.values() if any(fnmatchcase(name, p) for name in n for p in patterns))
        if not names:
            raise ConfigError(f"at least one parameter must be trained, got trainable = {patterns}")
        for name in names:
            if not values[name].is_floating_point():
                raise ConfigError(f"trained parameters must be real floats, {name} is {values[name].dtype}")
        for name, layer in own.named_modules():
            if getattr(layer, "running_mean", None) is None:
                continue
            parts = {f"{name}.{parameter}" if name else parameter for parameter, _ in layer.named_parameters()}
            seen = getattr(layer, "num_batches_tracked", None)
            if parts & set(names) or not isinstance(seen, torch.Tensor) or not seen:
                what = f"layer {name} ({type(layer).__name__})" if name else "the module"
                raise ConfigError(
                    f"running statistics must come trained and stay as they are, {what} would learn "
                    "them outside the private sum: use GroupNorm or track_running_stats=False, or leave it untrained"
                )
        # Two views of the same tensors: switching one module between modes would be state that callers share.
        tensors = {id(tensor): tensor for tensor in (*own.parameters(), *own.buffers())}
        training = copy.deepcopy(own, tensors).train()
        for layer in training.modules():
            if getattr(layer, "running_mean", None) is not None:
                layer.eval()
        object.__setattr__(self, "module", own)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "dimension", sum(values[name].numel() for name in names))
        object.__setattr__(self, "training", training)
        object.__setattr__(self, "scoring", own.eval())

    def initial(self) -> Params:
        """Return the trained parameters of the module as it was given, in the order of `names`."""
        values = dict(self.module.named_parameters())
        return self.flatten({name: values[name].detach() for name in self.names})

    def flatten(self, values: Mapping[str, torch.Tensor]) -> Params:
        """Join the values of `names` into one float32 vector."""
        flat: Params = torch.cat([values[name].reshape(-1).float() for name in self.names]).cpu().numpy()
        return flat

    def unflatten(self, params: Params) -> Tensors:
        """Cut a vector into fresh tensors, each with the shape and dtype of its parameter."""
        if params.shape != (self.dimension,) or params.dtype != np.float32:
            got = f"{params.dtype} of shape {params.shape}"
            raise ConfigError(f"params must be float32 of shape ({self.dimension},), got {got}")
        templates = dict(self.module.named_parameters())
        sizes = [templates[name].numel() for name in self.names]
        pieces = torch.split(torch.tensor(params, device=self.device), sizes)
        return {
            name: piece.view(templates[name].shape).to(templates[name].dtype, copy=True)
            for name, piece in zip(self.names, pieces, strict=True)
        }

    def load(self, params: Params) -> Module:
        """Return a copy of the module with these parameters, ready for use."""
        loaded = copy.deepcopy(self.scoring)
        tensors = dict(loaded.named_parameters())
        with torch.no_grad():  # not by load_state_dict, which a module may have changed
            for name, value in self.unflatten(params).items():
                tensors[name].copy_(value)
        return loaded

    def fixed(self) -> Tensors:
        """Return what is not trained: the other parameters, and a fresh copy of the buffers."""
        kept = {name: value.detach() for name, value in self.module.named_parameters() if name not in self.names}
        return kept | {name: value.clone() for name, value in self.module.named_buffers()}

    def working_copy(self) -> Module:
        """Return a copy of the module in training mode, for `reset`."""
        own = copy.deepcopy(self.training)
        for name, value in own.named_parameters():
            value.requires_grad_(name in self.names)
        return own

    def reset(self, own: Module, params: Params) -> list[torch.Tensor]:
        """Give a working copy these parameters and the module's buffers; return its trained tensors by `names`."""
        for name, buffer in self.module.named_buffers():
            owner, _, last = name.rpartition(".")
            setattr(own.get_submodule(owner), last, buffer.clone())
        values, tensors = self.unflatten(params), dict(own.named_parameters())
        with torch.no_grad():
            return [tensors[name].copy_(values[name]) for name in self.names]

    def losses_of(self, module: Module, values: Tensors | None, inputs: Any, labels: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the losses of a batch by `training`, which may change the buffers among `values`, or by `scoring`.

        None as values are those of the module itself, as of a working copy.
        """
        if self.step is None:
            inputs, labels = self.paired(inputs, labels)
            found = self.losses(seen_by(self.losses, self.outputs_of(module, values, inputs)), labels)
        else:
            found = _call(module, values, self.step, inputs if labels is None else (inputs, labels))
        if self.weigh is None or module is self.scoring:
            return found
        factors = torch.as_tensor(self.weigh(inputs, labels))
        if factors.shape != found.shape:
            raise ConfigError(
                f"example_weights must be one for each loss, got {tuple(factors.shape)} for {tuple(found.shape)}"
            )
        return found * factors

    def mean_of(self, losses: torch.Tensor, labels: Any) -> torch.Tensor:  # noqa: ANN401 - any data
        """Return the mean of a batch's losses, each weighted by how many of its targets count, as torch has it."""
        if not isinstance(self.losses, CrossEntropy) or self.step is not None or labels is None:
            return losses.mean()
        counts = self.losses.counted(labels)
        weighted = losses if labels.ndim == 1 else losses * counts  # the loss of a row that does not count is zero
        return weighted.sum() / counts.sum().clamp(min=1)

    def paired(self, inputs: Any, labels: Any) -> tuple[Any, Any]:  # noqa: ANN401 - any data
        """Return inputs and targets; a dictionary without targets has them under `labels`."""
        if labels is None and self.step is None and isinstance(inputs, Mapping) and "labels" in inputs:
            return {name: part for name, part in inputs.items() if name != "labels"}, inputs["labels"]
        return inputs, labels

    def outputs_of(self, module: Module, values: Tensors | None, inputs: Any) -> Any:  # noqa: ANN401 - any data
        """Return what the module, `training` or `scoring`, makes of inputs."""
        if self.forward is not None:
            return _call(module, values, self.forward, inputs)
        named = dict(inputs) if isinstance(inputs, Mapping) else {}
        given = () if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
        return (
            module(*given, **named) if values is None else torch.func.functional_call(module, values, given, named)
        )

    def has(self, *kinds: type[Module]) -> bool:
        """Tell whether a layer in training mode is of one of these kinds."""
        return any(isinstance(layer, kinds) and layer.training for layer in self.training.modules())

    @property
    def is_plain(self) -> bool:
        """Whether the module is called with one tensor and trained by the cross entropy of its outputs."""
        return self.losses == cross_entropy and all(each is None for each in (self.forward, self.step, self.weigh))

    def behind_front(self) -> "tuple[Module, Model] | None":
        """Return the layers before the first trained one, and the rest as a model of the same flat vector.

        None if there are none. What a front makes of an example never changes while a client trains, so it is made
        once. Layers that only flatten, and all from one that acts by chance or on a whole batch, count as rest.
        """
        hooks = self.forward, self.step, self.weigh
        is_chain = type(self.training) is nn.Sequential and all(each is None for each in hooks)
        layers = list(self.training.children()) if is_chain else []
        trained = {int(name.split(".")[0]) for name in self.names} if layers else set()
        kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)  # noqa: SLF001 - no other name
        cut = 0
        for at, layer in enumerate(layers):
            if at in trained or any(isinstance(part, kinds) and part.training for part in layer.modules()):
                break
            if type(layer) is not nn.Flatten:
                cut = at + 1
        if not cut:
            return None
        names = [name.split(".", 1) for name in self.names]
        rest = tuple(f"{int(layer) - cut}.{name}" for layer, name in names)
        behind = nn.Sequential(*layers[cut:])
        return nn.Sequential(*list(self.scoring.children())[:cut]), Model(behind, rest, self.losses)


def _copy_to(device: torch.device, module: Module) -> Module:
    """Return a copy of a module on a device; refuse one of which a part would be missing."""
    if any(nn.parameter.is_lazy(each) for each in (*module.parameters(), *module.buffers())):
        raise ConfigError("lazy layers must know their shapes: call the module once with a batch")
    if any(each._backward_hooks for each in module.parameters()):  # noqa: SLF001 - no public name
        raise ConfigError("hooks of parameters would be lost when the module is copied: give layers the hooks")
    try:
        return copy.deepcopy(module).to(device)
    except (RuntimeError, TypeError, ValueError) as error:  # weights that are computed, locks, no values
        line = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(f"the module cannot be copied to {device}: {line}") from error


class _Called(nn.ModuleList):
    """A module that is called by a user's function."""

    def forward(self, function: Callable[..., Any], given: Any) -> Any:  # noqa: ANN401 - what the function takes
        """Call the function with the module."""
        return function(self[0], given)


def _call(module: Module, values: Tensors | None, function: Callable[..., Any], given: Any) -> Any:  # noqa: ANN401
    if values is None:
        return function(module, given)
    named = {f"0.{name}": value for name, value in values.items()}
    return torch.func.functional_call(_Called([module]), named, (function, given))


def user_model(
    module: object,
    *,
    trainable: object = "*",
    loss: Losses | None = None,
    forward: Forward | None = None,
    step: Step | None = None,
    device: object = "cpu",
    weigh: Weigh | None = None,
) -> Model:
    """Return the model of a user's module; None as loss is the cross entropy of class labels."""
    if not isinstance(module, Module):
        raise ConfigError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    patterns = (trainable,) if isinstance(trainable, str) else trainable
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"trainable must be a pattern or a list of patterns, got {trainable!r}")
    for name, hook in (("loss", loss), ("forward", forward), ("step", step), ("example_weights", weigh)):
        if hook is not None and not callable(hook):
            raise ConfigError(f"{name} must be a function, got {type(hook).__name__}")
    if step is not None and loss is not None:
        raise ConfigError("step takes the place of the loss: give one of the two, got both")
    name, kind = str(device), str(device).partition(":")[0]
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(kind, True):
        raise ConfigError(f"device {name} is not available on this machine")
    try:
        place = torch.device(name if kind in available else "unknown")
    except RuntimeError:
        raise ConfigError(f"device must be one of {', '.join(available)}, got {name!r}") from None
    model = Model(module, tuple(patterns), by_row(loss), forward, step, place, weigh)
    for name, value in model.module.named_parameters():
        if not torch.isfinite(value).all():
            raise ConfigError(f"the module's parameters must be finite, {name} is not")
    return model


def fixed_content(model: Model) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of all that is not trained, in the order of the names."""
    for name, value in sorted(model.fixed().items()):
        whole = value.detach().to_dense().cpu().contiguous().reshape(-1)
        yield name, whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def evaluate(model: Model, params: Params, examples: Examples) -> dict[str, float]:
    """Return the share of examples whose class is right, and the mean loss, in evaluation mode."""
    if not len(examples):
        raise ConfigError("evaluation needs at least one example, got 0")
    batches = (examples.between(at, at + _EVALUATED) for at in range(0, len(examples), _EVALUATED))
    found = measure(model, params, batches, {"accuracy": Accuracy()})
    return {"accuracy": found["accuracy"], "loss": found["loss"]}


def example_losses(model: Model, params: Params, examples: Examples) -> NDArray[np.float64]:
    """Return the loss of each example, in evaluation mode."""
    values, here = model.unflatten(params) | model.fixed(), examples.each(lambda leaf: leaf.to(model.device))
    with torch.no_grad():
        losses = model.losses_of(model.scoring, values, here.inputs, here.labels)
    return np.asarray(losses.cpu().double().numpy().reshape(len(examples), -1).mean(axis=1))


def measure(
    model: Model, params: Params, batches: Iterable[Examples], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return the mean loss in evaluation mode, and each metric of all rows together; without rows nothing."""
    values, loss, count, outputs, targets = Tensors(), 0.0, 0, list[Tree](), list[Tree]()
    with torch.no_grad():
        for batch in batches:
            if not len(batch):
                continue
            values = values or model.unflatten(params) | model.fixed()
            here = batch.each(lambda leaf: leaf.to(model.device))
            inputs, labels = model.paired(here.inputs, here.labels)
            is_seen = model.step is None or metrics
            found = model.outputs_of(model.scoring, values, inputs) if is_seen else None
            if model.step is None:
                losses = model.losses(seen_by(model.losses, found), labels)
            else:
                losses = model.losses_of(model.scoring, values, here.inputs, here.labels)
            loss += float(model.mean_of(losses.cpu().double(), mapped(torch.Tensor.cpu, labels))) * len(batch)
            count += len(batch)
            if metrics:
                outputs.append(mapped(torch.Tensor.cpu, seen_by(next(iter(metrics.values())), found)))
                targets.append(mapped(torch.Tensor.cpu, labels))
        if not count:
            return {}
        numbers = {"loss": loss / count}
        ignored = getattr(model.losses, "ignored", getattr(model.losses, "ignore_index", IGNORED))
        fills = (outputs, 0), (targets, ignored)
        whole = [mapped(lambda *parts: _joined(parts, fill), *trees) for trees, fill in fills if metrics]  # noqa: B023
        for name, metric in metrics.items():
            value = metric(*whole)
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                text = f"the metric {name} must return a number, got {type(value).__name__}"
                raise ConfigError(text) from None
    return numbers


def _joined(parts: Sequence[torch.Tensor], fill: float) -> torch.Tensor:
    """Return batches as one tensor; those whose rows are shorter than others' are filled up."""
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    size = [max(part.shape[axis] for part in parts) for axis in range(1, parts[0].ndim)]
    whole = parts[0].new_full((sum(map(len, parts)), *size), fill if not parts[0].is_floating_point() else 0)
    start = 0
    for part in parts:
        whole[(slice(start, start + len(part)), *(slice(0, length) for length in part.shape[1:]))] = part
        start += len(part)
    return whole
