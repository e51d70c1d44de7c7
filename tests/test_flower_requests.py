"""Layouts, tasks and requests as bytes: they come back as they were, and anything else is refused before it is used."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.deploy import requests
from d2pfed.deploy.layout import ArraySpec, Layout, decode_task, encode_task
from d2pfed.deploy.requests import (
    PLAN_VERSION,
    ExchangeRequest,
    RunAcceptance,
    RunAnnouncement,
    own_versions,
)
from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.model_bytes import decode_model, encode_model
from d2pfed.secagg.wire import VERSION


def test_layouts_come_back_and_refuse_what_is_no_parameter():
    arrays = {
        "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bias": np.array([7.0, 8.0]),
        "scale": np.array(9.0, np.float16),
    }
    layout = Layout.of(arrays)
    assert Layout.decode(layout.encode()) == layout
    flat = layout.flatten(arrays)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    back = layout.unflatten(flat)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
    assert [back[name].dtype.name for name in arrays] == ["float32", "float64", "float16"]
    with pytest.raises(ConfigError, match="counters and other buffers are not parameters"):
        Layout.of({"seen": np.array(3)})
    with pytest.raises(ConfigError, match="the arrays must be weight"):
        layout.flatten({"weight": np.zeros(6, np.float32)})
    more = {"seen": np.array(3)} | dict(reversed(arrays.items()))
    assert layout.flatten(more).tolist() == flat.tolist()


def test_models_come_back_and_damaged_ones_are_refused():
    layout = Layout.of({"params": np.zeros(4, np.float32)})
    params = np.array([1.5, -2, 0, 4], np.float32)
    model = encode_model(params)
    assert np.array_equal(decode_model(model, layout.dimension), params)
    for damaged in (model[:-1], model + b"\0", b""):
        with pytest.raises(PeerError, match="a model of 4 parameters at 32 bits must have 16 bytes"):
            decode_model(damaged, layout.dimension)


def test_tasks_come_back_with_their_configuration_and_others_are_refused():
    layout = Layout.of({"params": np.zeros(4, np.float32)})
    other = Layout.of({"weights": np.zeros(4, np.float32)})
    task = encode_task(layout, {"lr": 0.1, "server-round": 3, "name": "x"})
    assert dict(decode_task(task, layout)) == {"lr": 0.1, "server-round": 3, "name": "x"}
    size = int.from_bytes(task[:4], "little")
    arrays = task[: 4 + size]
    for damaged in (encode_task(other, {}), task[:3], b"\xff\xff\xff\xff" + task[4:], b""):
        with pytest.raises(PeerError, match="layout that the run was announced with"):
            decode_task(damaged, layout)
    for text in (b"", b"[]", b"[" * 100_000, b'{"a": {"b": 1}}', b'{"a": 1', b'{"a": ' + b"9" * 5000 + b"}"):
        with pytest.raises(PeerError, match="flat JSON object"):
            decode_task(arrays + text, layout)
    with pytest.raises(ConfigError, match="numbers, texts and lists"):
        encode_task(layout, {"bytes": b"raw"})


@pytest.mark.parametrize(
    "shape",
    [(10**300,), (1 << 32,), (-1,), (1 << 31, 1 << 31), (1,) * 33, (0,)],
    ids=lambda shape: str(len(shape)),
)
def test_a_layout_of_nonsense_is_refused_without_work(shape):
    with pytest.raises(ConfigError):
        Layout((ArraySpec("a", shape, "float32"),))


def test_arrays_have_names_of_their_own_and_not_too_long():
    entry = ArraySpec("a", (1,), "float32")
    with pytest.raises(ConfigError, match="distinct names"):
        Layout((entry, entry))
    with pytest.raises(ConfigError, match="at most 1024 characters"):
        replace(entry, name="n" * 2000)


def test_a_layout_has_no_more_arrays_than_any_model():
    entry = ArraySpec("a", (1,), "float32")
    with pytest.raises(ConfigError, match="at most 16384 arrays, got 16385"):
        Layout(tuple(replace(entry, name=str(number)) for number in range((1 << 14) + 1)))
    with pytest.raises(ConfigError, match="at most 2097152 are read"):
        Layout.decode(" " * (1 << 22))


ANNOUNCED = RunAnnouncement("a run", "a plan", "a layout", 3, b"roster")


def test_requests_come_back_as_they_were():
    request, acceptance = ExchangeRequest(b"frame", 1.5, 5.0), RunAcceptance((1 << 64) - 1, b"s" * 64)
    assert ExchangeRequest.decode(request.encode()) == request
    assert RunAcceptance.decode(acceptance.encode()) == acceptance
    assert RunAcceptance.decode(RunAcceptance(7, b"").encode()) == RunAcceptance(7, b"")
    assert RunAnnouncement.decode(ANNOUNCED.encode()) == ANNOUNCED


DAMAGE = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"?",
    "empty": lambda data: b"",
    "noise": lambda data: b"\xff" * 100,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_announcement_is_refused(damage):
    with pytest.raises(PeerError):
        RunAnnouncement.decode(damage(ANNOUNCED.encode()))


@pytest.mark.parametrize("size", [0, 7, 9, 73, 2048])
def test_an_acceptance_has_an_exact_size(size):
    with pytest.raises(PeerError, match=r"must have an identity and a signature|more bytes were expected"):
        RunAcceptance.decode(RunAcceptance(7, b"").encode()[:-8] + bytes(size))


OTHER = {"wire": ("9.9", 77, PLAN_VERSION), "plan": ("9.9", VERSION, 77)}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_client_refuses_a_server_of_another_version_and_says_its_own(monkeypatch, other):
    own = own_versions()
    monkeypatch.setattr(requests, "own_versions", lambda: other)
    sent = ANNOUNCED.encode() + b"what a later version adds"
    monkeypatch.undo()
    theirs, ours = (f"d2pfed '{each[0]}' (wire {each[1]}, plan {each[2]})" for each in (other, own))
    with pytest.raises(PeerError) as refused:
        RunAnnouncement.decode(sent)
    assert str(refused.value) == f"the server has {theirs}, and this side has {ours}: they are incompatible"


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_server_refuses_a_client_of_another_version(monkeypatch, other):
    monkeypatch.setattr(requests, "own_versions", lambda: other)
    answer = RunAcceptance(7, b"").encode()
    monkeypatch.undo()
    with pytest.raises(PeerError, match=r"the client has d2pfed '9.9' .*: they are incompatible"):
        RunAcceptance.decode(answer)


def test_another_release_of_the_same_versions_is_taken(monkeypatch):
    monkeypatch.setattr(requests, "own_versions", lambda: ("9.9", VERSION, PLAN_VERSION))
    announced, accepted = ANNOUNCED.encode(), RunAcceptance(7, b"").encode()
    monkeypatch.undo()
    assert RunAnnouncement.decode(announced) == ANNOUNCED
    assert RunAcceptance.decode(accepted) == RunAcceptance(7, b"")


LONG = {
    "run": "r" * 256,
    "plan": "p" * 70_000,
    "layout": "l" * 5_000_000,
    "roster": bytes((1 << 26) + 1),
    "first_draw": 1 << 40,
}


@pytest.mark.parametrize("name", LONG)
def test_an_announcement_is_measured_before_it_is_read(name):
    with pytest.raises(PeerError, match=r"size of at most|first draw must be in"):
        RunAnnouncement.decode(replace(ANNOUNCED, **{name: LONG[name]}).encode())


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[2J"])
def test_a_run_has_a_name_that_can_be_printed(name):
    with pytest.raises(PeerError, match="printable"):
        RunAnnouncement.decode(replace(ANNOUNCED, run=name).encode())


@pytest.mark.parametrize(("seconds", "whole"), [(1.0, 0.5), (0.0, 5.0), (0.0, 0.0), (1.0, 1e9), (1e9, 1e9)])
def test_a_request_does_not_wait_for_ever(seconds, whole):
    with pytest.raises(PeerError, match="attempt_seconds"):
        ExchangeRequest.decode(ExchangeRequest(b"frame", seconds, whole).encode())
