"""What stays with a client: arrays that are part of its model and not trained together, from round to round."""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from d2pfed.accounting import is_amplified
from d2pfed.deploy.layout import Layout, NamedArrays
from d2pfed.errors import D2PFedError
from d2pfed.ledger.files import keep_newest, locked, make_directory, read_file, replace_file
from d2pfed.numerics.randomness import digest
from d2pfed.plan import Plan

_log = logging.getLogger("d2pfed.deploy")

MOST_RUNS = 64  # whose arrays are kept: those of a run that is over are of no use


def may_outlive_rounds(plan: Plan) -> bool:
    """Return whether a client may train from what earlier rounds have left with it.

    Where cohorts hide who takes part, its vector would tell others in which rounds it was.
    Proof: theory.md#state. Checked: test_flower_local_arrays.py::test_behind_drawn_cohorts_no_client_keeps_a_state.
    """
    return plan.batches is None and not is_amplified(plan.sampling)


@dataclass(frozen=True, slots=True)
class LocalArrays:
    """A client's own arrays of one run, such as the statistics of batch norms, in a file of its directory.

    Guarantee: they get no noise because they do not leave. What cannot be read, and everything behind drawn cohorts,
    is as before the first round. Checked: test_flower_local_arrays.py::test_statistics_stay_with_their_client.
    """

    directory: Path
    run: str
    plan: Plan

    def load(self, layout: Layout) -> dict[str, np.ndarray]:
        """Return the arrays as this client has left them, or as they are before the first round."""
        arrays = layout.initial_local()
        if not arrays or not may_outlive_rounds(self.plan):
            return arrays
        try:
            kept = load(read_file(self._file) or save({}))
        except (SafetensorError, D2PFedError, OSError, ValueError) as error:
            _log.warning("the local arrays of a run are as before its first round: %s", error)
            kept = {}
        return arrays | {
            array.name: kept[array.name]
            for array in layout.local or ()
            if array.name in kept and array.fits(kept[array.name])
        }

    def keep(self, layout: Layout, trained: NamedArrays) -> None:
        """Keep what training has made of them, where it may be kept."""
        if not may_outlive_rounds(self.plan):
            return
        found = {
            array.name: np.asarray(trained[array.name], order="C")
            for array in layout.local or ()
            if array.name in trained and array.fits(trained[array.name])
        }
        before = self.load(layout)
        if any(not np.array_equal(found[name], before[name]) for name in found):
            make_directory(self._file.parent)
            with locked(self.directory / "local.lock"):
                replace_file(self._file, save(found))
                keep_newest(self._file.parent, MOST_RUNS)

    @property
    def _file(self) -> Path:
        return self.directory / "local" / digest("d2pfed local arrays", self.run).hex()[:32]
