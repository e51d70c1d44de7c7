"""Personal layers: parameters that each client trains for itself and keeps; what is sent is of the others alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.local_settings import LocalTraining
from d2pfed.learning.local_training import SequentialTrainer
from d2pfed.learning.model import Model, Module, Params
from d2pfed.learning.task import Clients
from d2pfed.learning.user_clients import UserClients, held_by
from d2pfed.ledger.files import make_directory, read_file, replace_file


def without_personal(whole: Model, personal: object) -> Model:
    """Return the model of what clients share, the trained parameters that no pattern names."""
    patterns = (personal,) if isinstance(personal, str) else personal
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"personal must be a pattern or a list of patterns, got {personal!r}")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in whole.names):
            raise ConfigError(f"personal must name trained parameters, {pattern!r} names none")
    shared = tuple(name for name in whole.names if not any(fnmatchcase(name, each) for each in patterns))
    if not shared:
        raise ConfigError("some trained parameters must be shared, personal names all of them")
    return replace(whole, trainable=shared)


@dataclass(frozen=True, slots=True, eq=False)
class PersonalTrainer:
    """Trains client after client, each from the shared parameters and its own, which it keeps in a file.

    A round that is tried again starts from what the client had before it.
    """

    whole: Model  # of shared and personal parameters
    model: Model  # of the shared ones
    clients: Clients | UserClients
    local: LocalTraining
    directory: Path
    note: str = "Clients are trained one by one, each with layers of its own."
    shared: NDArray[np.bool_] = field(init=False, repr=False)  # which numbers of the whole vector are shared

    def __post_init__(self) -> None:
        values = dict(self.whole.module.named_parameters())
        parts = [np.full(values[name].numel(), name in self.model.names) for name in self.whole.names]
        object.__setattr__(self, "shared", np.concatenate(parts))

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update of the shared parameters, in the order of `clients`."""
        inner, copy = SequentialTrainer(self.whole, self.clients, self.local), self.whole.working_copy()
        for client in clients:
            seed, before, after = self._kept(client)
            own = before if seed == round_seed else after
            held = held_by(self.clients, client)
            update = inner.train(self._joined(params, own), held, client, round_seed, copy)
            trained = own + update[~self.shared]
            if round_seed and np.isfinite(trained).all():  # seed 0 is a trial's
                content = BytesIO()
                np.savez(content, seed=np.int64(round_seed), before=own, after=trained)
                make_directory(self.directory)
                replace_file(self._file(client), content.getvalue())
            yield update[self.shared]

    def module(self, params: Params, client: int) -> Module:
        """Return the module with the shared parameters and those that a client keeps."""
        return self.whole.load(self._joined(params, self._kept(client)[2]))

    def _joined(self, params: Params, own: Params) -> Params:
        joined = np.empty(len(self.shared), np.float32)
        joined[self.shared], joined[~self.shared] = params, own
        return joined

    def _kept(self, client: int) -> tuple[int, Params, Params]:
        """Return the seed of the client's last round, and its parameters before and after it."""
        content = read_file(self._file(client))
        if content is None:
            initial = self.whole.initial()[~self.shared]
            return 0, initial, initial
        with np.load(BytesIO(content)) as found:
            return int(found["seed"]), found["before"], found["after"]

    def _file(self, client: int) -> Path:
        return self.directory / f"{client}.npz"
