"""Buffers, such as the statistics of batch norms: they stay with their client, and outlive a round where they may."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Message, RecordDict

from d2pfed.accounting import Sampling
from d2pfed.deploy import state as local_arrays
from d2pfed.deploy.layout import ArraySpec, Layout, LocalArray
from d2pfed.deploy.state import LocalArrays
from d2pfed.errors import ConfigError
from d2pfed.flower.grid import from_record
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan
from support.local_grid import make_grid, make_strategy

SEEN = 31337.0  # in the place of a statistic of someone's data


def initial() -> ArrayRecord:
    return ArrayRecord(
        {
            "params": Array(np.zeros(DIMENSION, np.float32)),
            "norm.running_var": Array(np.ones(3, np.float32)),
            "norm.num_batches_tracked": Array(np.array(0)),
        }
    )


def counting(seen: dict[int, list[np.ndarray]]):
    """Training that wants every array, as a strict load does, and moves the statistics."""

    def of(client: int):
        def train(message: Message, _context: object) -> Message:
            arrays = {name: array.numpy().copy() for name, array in message.content["arrays"].items()}
            assert set(arrays) == {"params", "norm.running_var", "norm.num_batches_tracked"}
            seen.setdefault(client, []).append(
                (arrays["norm.running_var"], int(arrays["norm.num_batches_tracked"]))
            )
            arrays["params"][client] += 1.0
            arrays["norm.running_var"] = arrays["norm.running_var"] + np.float32(SEEN + client)
            arrays["norm.num_batches_tracked"] += 7
            record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
            return Message(RecordDict({"arrays": record}), reply_to=message)

        return train

    return of


def test_statistics_stay_with_their_client(tmp_path):
    seen: dict[int, list[np.ndarray]] = {}
    plan, roster, grid = make_plan(rounds=2), enrol(tmp_path, 5), make_grid(tmp_path, train=counting(seen))
    strategy = make_strategy(plan, tmp_path, roster, trained=("params",))
    evaluated = []
    result = strategy.start(grid, initial(), 2, 60.0, evaluate_fn=lambda _, arrays: evaluated.append(set(arrays)))
    assert evaluated == [set(initial())] * 3
    assert result.arrays["params"].numpy()[:5].min() > 0.1
    assert result.arrays["norm.running_var"].numpy().tolist() == [1.0, 1.0, 1.0]
    for client in range(5):
        first, second = seen[client]
        assert (first[0].tolist(), first[1]) == ([1.0] * 3, 0)
        assert (second[0].tolist(), second[1]) == ([1.0 + SEEN + client] * 3, 7)
    statistic = np.float32(1.0 + SEEN).tobytes()
    assert not any(statistic in from_record(reply.content)[1] for reply in grid.received)
    kept = list((directory_of(tmp_path, 0) / "local").iterdir())
    assert [file.stat().st_mode & 0o777 for file in kept] == [0o600]


def drawn(tmp_path, monkeypatch=None) -> list[int]:
    """How many batches clients had counted before, in all rounds behind cohorts of four of six."""
    if monkeypatch is not None:
        monkeypatch.setattr(local_arrays, "may_outlive_rounds", lambda _plan: True)
    tmp_path.mkdir()
    seen: dict[int, list[np.ndarray]] = {}
    plan = make_plan(6, rounds=3, cohort_size=4, sampling=Sampling.FIXED, dropouts=0.0, max_participations=3)
    roster, grid = enrol(tmp_path, 6), make_grid(tmp_path, 6, train=counting(seen))
    make_strategy(plan, tmp_path, roster, trained=("params",)).start(grid, initial(), 3, 60.0)
    assert max(map(len, seen.values())) > 1
    return sorted(count for rounds in seen.values() for _, count in rounds)


def test_behind_drawn_cohorts_no_client_keeps_a_state(tmp_path, monkeypatch):
    """Else its vector tells who sees the models in which rounds it was, which amplification takes for a secret."""
    assert set(drawn(tmp_path / "refused")) == {0}
    assert not list(tmp_path.glob("refused/*/local"))
    assert max(drawn(tmp_path / "kept", monkeypatch)) > 0


def test_without_trained_names_buffers_are_trained_or_refused(tmp_path):
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    with pytest.raises(ConfigError, match="counters and other buffers are not parameters"):
        make_strategy(plan, tmp_path, roster).start(grid, initial(), 1)


def local_array(name, array):
    return LocalArray(name, array.shape, array.dtype.name, array.tobytes())


def layout() -> Layout:
    return Layout((ArraySpec("params", (4,), "float32"),), (local_array("mean", np.zeros(2, np.float32)),))


def test_a_layout_with_local_arrays_is_read_back():
    assert Layout.decode(layout().encode()) == layout()
    assert "local" not in Layout(layout().entries).encode()


def test_what_was_kept_is_used_if_it_fits(tmp_path):
    arrays = LocalArrays(tmp_path, "a run", make_plan())
    assert arrays.load(layout())["mean"].tolist() == [0.0, 0.0]
    arrays.keep(layout(), {"mean": np.array([1, 2], np.float32), "params": np.ones(4, np.float32)})
    assert arrays.load(layout())["mean"].tolist() == [1.0, 2.0]
    assert LocalArrays(tmp_path, "another", make_plan()).load(layout())["mean"].tolist() == [0.0, 0.0]
    wider = Layout(layout().entries, (local_array("mean", np.zeros(3, np.float32)),))
    assert arrays.load(wider)["mean"].tolist() == [0.0] * 3


def test_a_damaged_file_is_as_before_the_first_round(tmp_path, caplog):
    arrays = LocalArrays(tmp_path, "a run", make_plan())
    arrays.keep(layout(), {"mean": np.array([1, 2], np.float32)})
    (file,) = (tmp_path / "local").iterdir()
    file.write_bytes(b"\xff" * 40)
    assert arrays.load(layout())["mean"].tolist() == [0.0, 0.0]
    assert "reset to their values before its first round" in caplog.text


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (lambda: LocalArray("a", (2,), "complex64", bytes(16)), "must be of float16"),
        (lambda: LocalArray("a", (2,), "float32", bytes(4)), "must have as many bytes as its shape needs"),
        (lambda: local_array("a", np.zeros(1 << 20, np.float32)), "send only what is trained"),
        (lambda: Layout(layout().entries, (local_array("params", np.zeros(1)),)), "distinct names"),
        (lambda: Layout.of({"a": np.zeros(1, np.float32)}, ["b"]), "'b' is missing"),
    ],
)
def test_local_arrays_are_checked(made, rule):
    with pytest.raises(ConfigError, match=rule):
        made()
