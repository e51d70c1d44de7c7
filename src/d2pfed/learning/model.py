"""Any torch module as one flat vector of the parameters that are trained."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError

Params = NDArray[np.float32]
Losses = Callable[..., torch.Tensor]  # of outputs and targets; of each example, or their mean
Forward = Callable[[torch.nn.Module, Any], Any]  # from a module and inputs to outputs
Step = Callable[[torch.nn.Module, Any], torch.Tensor]  # from a module and a batch to its loss
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row of logits."""
    return torch.nn.functional.cross_entropy(outputs.float(), labels, reduction="none")


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A module, which of its parameters are trained, and the loss of each example.

    `trainable` holds names or patterns (`head.*`); what they leave out, and what does not require gradients, keeps
    its value and costs nothing. Shared parameters count once, under any of their names. Buffers never leave a
    client: each starts from the module's. A normalisation that learns running statistics is refused, unless it
    comes trained and is left as it is: its statistics would reach the server outside the private sum, or never.
    The module must treat the rows of a batch one by one.

    `forward` says how the module is called, where inputs are not one tensor, a tuple of arguments or a dictionary of
    them. `step` takes the place of forward and loss: from the module and a whole batch to its loss.
    """

    module: torch.nn.Module = field(repr=False)
    trainable: tuple[str, ...] = ("*",)
    losses: Losses = field(default=cross_entropy, repr=False)
    forward: Forward | None = field(default=None, repr=False)
    step: Step | None = field(default=None, repr=False)
    device: torch.device = CPU
    names: tuple[str, ...] = field(init=False)
    dimension: int = field(init=False)
    _training: torch.nn.Module = field(init=False, repr=False)
    _scoring: torch.nn.Module = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own = copy.deepcopy(self.module).to(self.device)
        names = _chosen(own, self.trainable)
        _refuse_running_statistics(own, names)
        values = dict(own.named_parameters())
        for name in names:
            if not values[name].is_floating_point():
                raise ConfigError(f"trained parameters must be real floats, {name} is {values[name].dtype}")
        # Two views of the same tensors: switching one module between modes would be state that callers share.
        tensors = {id(tensor): tensor for tensor in (*own.parameters(), *own.buffers())}
        training = copy.deepcopy(own, tensors).train()
        for layer in training.modules():
            if _running_statistics(layer):
                layer.eval()
        object.__setattr__(self, "module", own)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "dimension", sum(values[name].numel() for name in names))
        object.__setattr__(self, "_training", training)
        object.__setattr__(self, "_scoring", own.eval())

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
        self._check(params)
        templates = dict(self.module.named_parameters())
        pieces = torch.split(
            torch.tensor(params, device=self.device), [templates[name].numel() for name in self.names]
        )
        cut: Tensors = {}
        for name, piece in zip(self.names, pieces, strict=True):
            cut[name] = piece.view(templates[name].shape).to(templates[name].dtype, copy=True)
        return cut

    def load(self, params: Params) -> torch.nn.Module:
        """Return a copy of the module with these parameters, ready for use."""
        loaded = copy.deepcopy(self._scoring)
        loaded.load_state_dict(self.unflatten(params), strict=False)
        return loaded

    def fixed(self) -> Tensors:
        """Return what is not trained: the other parameters, and a fresh copy of the buffers."""
        kept = {name: value.detach() for name, value in self.module.named_parameters() if name not in self.names}
        return kept | {name: value.clone() for name, value in self.module.named_buffers()}

    def training_losses(self, values: Tensors, inputs: Any, labels: Any) -> torch.Tensor:  # noqa: ANN401 - any data
        """Return the losses of a batch in training mode; may change the buffers among `values`."""
        return self._losses(self._training, values, inputs, labels)

    def scoring_losses(self, values: Tensors, inputs: Any, labels: Any) -> torch.Tensor:  # noqa: ANN401 - as above
        """Return the losses of a batch in evaluation mode."""
        return self._losses(self._scoring, values, inputs, labels)

    def outputs(self, values: Tensors, inputs: Any) -> Any:  # noqa: ANN401 - as above
        """Return the module's outputs in evaluation mode."""
        return self._outputs(self._scoring, values, inputs)

    @property
    def is_plain(self) -> bool:
        """Whether the module is called with one tensor and trained by the cross entropy of its outputs."""
        return self.losses is cross_entropy and self.forward is None and self.step is None

    def _losses(self, module: torch.nn.Module, values: Tensors, inputs: Any, labels: Any) -> torch.Tensor:  # noqa: ANN401
        if self.step is not None:
            batch = inputs if labels is None else (inputs, labels)
            found: torch.Tensor = _call(module, values, self.step, batch)
            return found
        return self.losses(self._outputs(module, values, inputs), labels)

    def _outputs(self, module: torch.nn.Module, values: Tensors, inputs: Any) -> Any:  # noqa: ANN401 - as above
        if self.forward is not None:
            return _call(module, values, self.forward, inputs)
        if isinstance(inputs, Mapping):
            return torch.func.functional_call(module, values, (), dict(inputs))
        return torch.func.functional_call(module, values, inputs if isinstance(inputs, tuple) else (inputs,))

    def has(self, *kinds: type[torch.nn.Module]) -> bool:
        """Tell whether a layer in training mode is of one of these kinds."""
        return any(isinstance(layer, kinds) and layer.training for layer in self._training.modules())

    def behind_front(self) -> "tuple[torch.nn.Module, Model] | None":
        """Return the layers before the first trained one, and the rest as a model of the same flat vector.

        None if there are none. What a front makes of an example never changes while a client trains, so it is made
        once. Layers that only flatten, and all from one that acts by chance or on a whole batch, count as rest.
        """
        is_chain = type(self._training) is torch.nn.Sequential and self.forward is None and self.step is None
        layers = list(self._training.children()) if is_chain else []
        trained = {int(name.split(".")[0]) for name in self.names} if layers else set()
        front = list(takewhile(lambda at: at not in trained and not _varies(layers[at]), range(len(layers))))
        while front and type(layers[front[-1]]) is torch.nn.Flatten:
            front.pop()
        if not front:
            return None
        cut = len(front)
        names = [name.split(".", 1) for name in self.names]
        rest = tuple(f"{int(layer) - cut}.{name}" for layer, name in names)
        behind = torch.nn.Sequential(*layers[cut:])
        return torch.nn.Sequential(*list(self._scoring.children())[:cut]), Model(behind, rest, self.losses)

    def _check(self, params: Params) -> None:
        if params.shape != (self.dimension,) or params.dtype != np.float32:
            got = f"{params.dtype} of shape {params.shape}"
            raise ConfigError(f"params must be float32 of shape ({self.dimension},), got {got}")


class _Called(torch.nn.Module):
    """A module that is called by a user's function."""

    def __init__(self, inner: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self._function = function

    def forward(self, given: Any) -> Any:  # noqa: ANN401 - what the function takes and returns
        """Call the function with the module."""
        return self._function(self.inner, given)


def _call(module: torch.nn.Module, values: Tensors, function: Callable[..., Any], given: Any) -> Any:  # noqa: ANN401
    named = {f"inner.{name}": value for name, value in values.items()}
    return torch.func.functional_call(_Called(module, function), named, (given,))


def _chosen(module: torch.nn.Module, patterns: tuple[str, ...]) -> tuple[str, ...]:
    aliases: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        if value.requires_grad:
            aliases.setdefault(id(value), []).append(name)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for names in aliases.values() for name in names):
            names = [name for group in aliases.values() for name in group]
            some = ", ".join(names[:6]) + ", ..." * (len(names) > 6)
            raise ConfigError(
                f"trainable must name parameters that require gradients, {pattern!r} names none of {some or 'none'}"
            )
    chosen = [n[0] for n in aliases.values() if any(fnmatchcase(name, p) for name in n for p in patterns)]
    if not chosen:
        raise ConfigError(f"at least one parameter must be trained, got trainable = {patterns}")
    return tuple(chosen)


def _varies(layer: torch.nn.Module) -> bool:
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)  # noqa: SLF001 - no other name
    return any(isinstance(part, kinds) and part.training for part in layer.modules())


def _named(name: str, layer: torch.nn.Module) -> str:
    return f"layer {name} ({type(layer).__name__})" if name else "the module"


def _running_statistics(layer: torch.nn.Module) -> bool:
    return isinstance(getattr(layer, "running_mean", None), torch.Tensor)


def _refuse_running_statistics(module: torch.nn.Module, trained: tuple[str, ...]) -> None:
    for name, layer in module.named_modules():
        if not _running_statistics(layer):
            continue
        own = {f"{name}.{parameter}" if name else parameter for parameter, _ in layer.named_parameters()}
        seen = getattr(layer, "num_batches_tracked", None)
        if own & set(trained) or not isinstance(seen, torch.Tensor) or not seen:
            raise ConfigError(
                f"running statistics must come trained and stay as they are, {_named(name, layer)} would learn "
                "them outside the private sum: use GroupNorm or track_running_stats=False, or leave it untrained"
            )
