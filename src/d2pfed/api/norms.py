"""Norms of the clients' updates, where training is in the clear and the server sees them anyway."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from d2pfed.ledger.files import opened_for_lines
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import RingVector
from d2pfed.round import Units
from d2pfed.simulation import Backend, Encoder

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
FILE = "norms.jsonl"  # in the directory of a run in the clear: the norms of each round, null for no finite update


class NormRecorder:
    """A backend that passes updates on and writes their norms down."""

    def __init__(self, backend: Backend, file: Path) -> None:
        self._backend = backend
        self._file = file

    def train(
        self, params: FloatVector, clients: Sequence[int], seed: int
    ) -> Iterator[FloatVector | Units | None]:
        """Yield the updates of these clients, in their order."""
        norms: list[float | None] = []
        for update in self._backend.train(params, clients, seed):
            if isinstance(update, np.ndarray):
                norm = float(np.linalg.norm(update.astype(np.float64)))
                norms.append(norm if np.isfinite(norm) else None)
            yield update
        with opened_for_lines(self._file) as opened:
            opened.write(json.dumps(norms) + "\n")

    def encode(
        self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int
    ) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        """Encode without a look: what is private stays so."""
        return self._backend.encode(encoder, params, clients, seed)

    def close(self) -> None:
        """End the workers, if there are any."""
        self._backend.close()


def read_norms(directory: Path) -> tuple[dict[float, float], int]:
    """Return quantiles of the norms of all rounds, and how many updates were not finite; none of a private run."""
    file = directory / FILE
    if not file.exists():
        return {}, 0
    every = [norm for line in file.read_text("utf-8").splitlines() for norm in json.loads(line)]
    found = [norm for norm in every if norm is not None]
    quantiles = np.quantile(found, QUANTILES).tolist() if found else []
    return dict(zip(QUANTILES, quantiles, strict=False)), len(every) - len(found)
