"""A model is sent to a node once; a wrong one is refused, and one that was lost is sent again."""

import shutil
import warnings
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from d2pfed.deploy import requests, transport
from d2pfed.deploy.requests import MISSING, Blob, ExchangeRequest, MissingBlob, RequestKind
from d2pfed.deploy.state import MAX_BLOBS, Blobs
from d2pfed.deploy.transport import Answer, ClientExchange, Deadlines, Pace, Transport
from d2pfed.errors import PeerError
from d2pfed.flower.grid import GridEngine, from_record, to_record
from d2pfed.ledger import RowKind, read_rows
from d2pfed.secagg.wire import MessageKind, frame
from support.enrolled_clients import directory_of, enrol, make_plan
from support.local_grid import make_grid, make_strategy, start


def blob_of(data):
    return Blob(data, sha256(data).digest())


MODEL = blob_of(b"a model" * 100)
HEAD = MessageKind.MASK_REQUEST, bytes(32), 0, b"shares"
FRAME = frame(*HEAD, MODEL.data)
REQUEST = ExchangeRequest(FRAME, 1.0, 2.0)
LONG = bytes(range(256)) * 40_000  # ten million bytes


def test_a_blob_that_is_known_is_referred_to_and_the_frame_is_whole_again(tmp_path):
    first, second = REQUEST.encode(MODEL), REQUEST.encode(MODEL, is_known=True)
    assert len(first) - len(second) == len(MODEL.data)
    with pytest.raises(MissingBlob):
        ExchangeRequest.decode(second, Blobs(tmp_path))
    assert ExchangeRequest.decode(first, Blobs(tmp_path)) == REQUEST
    assert ExchangeRequest.decode(second, Blobs(tmp_path)) == REQUEST


def test_a_wrong_blob_is_refused_and_not_kept(tmp_path):
    other = Blob(b"z" * len(MODEL.data), MODEL.digest)
    sent = ExchangeRequest(FRAME.replace(MODEL.data, other.data), 1.0, 2.0).encode(other)
    with pytest.raises(PeerError, match="a blob must have the digest that names it"):
        ExchangeRequest.decode(sent, Blobs(tmp_path))
    assert not (tmp_path / "blobs").exists()
    for size in (b"\xff" * 8, bytes(8)):
        sent = REQUEST.encode(MODEL)
        with pytest.raises(PeerError, match="a blob must have the digest"):
            ExchangeRequest.decode(sent[:49] + size + sent[57:], Blobs(tmp_path))
    with pytest.raises(PeerError, match="a request is whole, brings a blob or refers to one, got 9"):
        ExchangeRequest.decode(sent[:16] + b"\x09" + sent[17:])


def test_a_model_beside_its_frame_is_sent_and_referred_to_as_one_within(tmp_path):
    named = ExchangeRequest(frame(MessageKind.LATTICE_REQUEST, bytes(32), 0, b"a digest"), 1.0, 2.0)
    first, second = (named.encode(MODEL, is_known=known, is_beside=True) for known in (False, True))
    assert len(first) - len(second) == len(MODEL.data)
    with pytest.raises(MissingBlob):
        ExchangeRequest.decode(second, Blobs(tmp_path))
    for sent in (first, second):
        found = ExchangeRequest.decode(sent, Blobs(tmp_path))
        assert (found.frame, found.model) == (named.frame, MODEL.data)
    with pytest.raises(PeerError, match="a blob must have the digest"):
        ExchangeRequest.decode(first[:-1] + b"?", Blobs(tmp_path))


def test_a_damaged_blob_is_missing_and_the_latest_are_kept(tmp_path):
    blobs, known = Blobs(tmp_path), REQUEST.encode(MODEL, is_known=True)
    blobs.keep(MODEL.digest, MODEL.data)
    (tmp_path / "blobs" / MODEL.digest.hex()).write_bytes(b"damage")
    with pytest.raises(MissingBlob):
        ExchangeRequest.decode(known, blobs)
    for number in range(MAX_BLOBS + 2):
        later = blob_of(bytes([number]))
        blobs.keep(later.digest, later.data)
    assert len(list((tmp_path / "blobs").glob("?" * 64))) == MAX_BLOBS
    assert blobs.find(later.digest) == later.data


def test_a_blob_that_cannot_be_kept_stops_nothing(tmp_path, caplog):
    (tmp_path / "blobs").write_text("in the way")
    assert ExchangeRequest.decode(REQUEST.encode(MODEL), Blobs(tmp_path)) == REQUEST
    assert "a model was not stored" in caplog.text


@dataclass
class Node:
    """A node that answers each request, and says so where it lacks the blob."""

    blobs: Blobs
    sent: list[bytes] = field(default_factory=list)

    def nodes(self):
        return {100}

    def push(self, _kind, data, _node, _name, _seconds, blob=b""):
        self.sent.append(data + blob)
        return str(len(self.sent) - 1)

    def pull(self, requests):
        for request in list(requests):
            try:
                answer = ExchangeRequest.decode(self.sent[int(request)], self.blobs).frame[:9]
            except MissingBlob:
                answer = MISSING
            yield Answer(request, 100, RequestKind.EXCHANGE, answer)


def test_a_node_is_sent_a_blob_once_and_again_when_it_has_lost_it(tmp_path):
    node = Node(Blobs(tmp_path))
    exchange = ClientExchange(Transport(node, Pace(0.001)), {7: 100}, Deadlines(), lambda _kind: None, 1, MODEL)
    for _ in range(2):
        assert list(exchange({7: FRAME})) == [(7, FRAME[:9])]
    shutil.rmtree(tmp_path / "blobs")
    assert list(exchange({7: FRAME})) == [(7, FRAME[:9])]
    assert [len(data) > len(MODEL.data) for data in node.sent] == [True, False, False, True]
    whole, part = len(FRAME), len(FRAME) - len(MODEL.data)
    assert [each.sent_bytes for each in exchange.stats] == [whole, part, part + whole]


def test_a_model_beside_its_frame_is_counted_where_it_travels(tmp_path):
    named, node = frame(MessageKind.LATTICE_REQUEST, bytes(32), 0, b"a digest"), Node(Blobs(tmp_path))
    exchange = ClientExchange(Transport(node, Pace(0.001)), {7: 100}, Deadlines(), lambda _kind: None, 1, MODEL)
    for _ in range(2):
        assert list(exchange({7: named})) == [(7, named[:9])]
    assert [each.sent_bytes for each in exchange.stats] == [len(named) + len(MODEL.data), len(named)]


def test_a_node_that_lacks_what_it_was_sent_is_not_sent_it_for_ever(tmp_path):
    node = Node(Blobs(tmp_path))
    node.pull = lambda requests: [Answer(each, 100, RequestKind.EXCHANGE, MISSING) for each in list(requests)]
    exchange = ClientExchange(Transport(node, Pace(0.001)), {7: 100}, Deadlines(), lambda _kind: None, 1, MODEL)
    for _ in range(2):
        assert list(exchange({7: FRAME})) == [(7, MISSING)]
    assert len(node.sent) <= 4


def test_a_second_attempt_refers_to_its_model_and_recovers_a_lost_one(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "_SMALLEST_BLOB", 1)
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    lost, answers = [], []

    def coming(client, reply):
        kind, data = from_record(grid.sent[-1].content)
        if kind is not RequestKind.EXCHANGE or data[16] == 0 or reply.has_error():  # without a blob
            return reply
        answers.append((client, data[16], from_record(reply.content)[1] == MISSING))
        if client > 1 and client not in lost:
            lost.append(client)
            if len(lost) == 3:
                shutil.rmtree(directory_of(tmp_path, 0) / "blobs")
            return Message(Error(code=0, reason="lost"), reply_to=grid.sent[-1])
        return reply

    grid.coming = coming
    start(make_strategy(plan, tmp_path, roster), grid)
    rows = read_rows(tmp_path / "run" / "ledger.sqlite")
    assert [row.release.participants for row in rows if row.kind is RowKind.COMMIT] == [(0, 1, 2, 3, 4)]
    second = answers[5:]
    assert (0, 2, True) in second
    assert (0, 1, False) in second
    assert [each for each in second if each[0] in (1, 2)] == [(1, 2, False), (2, 1, False)]


def test_a_long_end_is_one_object_for_all_requests_in_chunks():
    first, second = (to_record(RequestKind.EXCHANGE, head, LONG) for head in (b"first", b"second"))
    assert from_record(first) == (RequestKind.EXCHANGE, b"first" + LONG)
    assert first["blob"].object_id == second["blob"].object_id  # what a SuperLink stores an object under
    chunks = first["blob"]["blob"].slice_array()
    assert len(chunks) > 1
    assert b"".join(chunk.data for _, chunk in chunks) == LONG


@pytest.mark.parametrize("data", [b"", b"short", LONG])
def test_data_of_any_length_is_read_as_it_was_sent(data):
    content = to_record(RequestKind.EXCHANGE, data)
    assert from_record(content) == (RequestKind.EXCHANGE, data)
    assert len(content) == 1 + (data == LONG)


@pytest.fixture(params=["memory", "database"])
def superlink(request, tmp_path):
    """The object store of a SuperLink without and with `--database`."""
    if request.param == "memory":
        return InMemoryObjectStore()
    store = SqlObjectStore(str(tmp_path / "superlink.db"))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Flower's own
        store.initialize()
    return store


def push(store, content, most=None, run=1):
    """Send a message's objects as Flower's grid does, all or the first few; return the bytes that were sent."""
    nested, sent = get_all_nested_objects(content), 0
    for name in store.preregister(run, get_object_tree(content))[:most]:
        data = nested[name].deflate()
        store.put(name, data)
        sent += len(data)
    return sent


def fetch(store, content):
    """What a node reads once all of a message's objects are there."""
    names = [each.object_id for each in iterate_object_tree(store.get_object_tree(content.object_id))]
    return from_record(inflate_object_from_contents(content.object_id, {name: store.get(name) for name in names}))[
        1
    ]


def test_a_superlink_stores_a_model_once_until_the_last_node_has_it(superlink):
    first, second = (to_record(RequestKind.EXCHANGE, head, LONG) for head in (b"first", b"second"))
    assert push(superlink, first) > len(LONG)
    assert push(superlink, second) < 1000
    assert fetch(superlink, first) == b"first" + LONG
    superlink.delete(first.object_id)  # a node has confirmed it
    assert fetch(superlink, second) == b"second" + LONG
    superlink.delete(second.object_id)
    assert len(superlink) == 0


def test_models_of_two_apps_that_share_a_chunk_outlive_each_other(superlink):
    first, second = (to_record(RequestKind.EXCHANGE, b"head", LONG[:size]) for size in (len(LONG), 6 << 20))
    push(superlink, first)
    assert push(superlink, second, run=2) < 2 << 20  # but for their common first chunk
    superlink.delete_objects_in_run(1)
    superlink.delete(first.object_id)
    assert fetch(superlink, second) == b"head" + LONG[: 6 << 20]


def test_a_model_that_a_killed_server_sent_in_part_is_completed_by_the_next(superlink):
    first, second = (to_record(RequestKind.EXCHANGE, head, LONG) for head in (b"first", b"second"))
    push(superlink, first, most=2)
    push(superlink, second)
    assert fetch(superlink, second) == b"second" + LONG


def test_a_superlink_that_has_lost_a_model_is_sent_it_again(superlink):
    content = to_record(RequestKind.EXCHANGE, b"head", LONG)
    push(superlink, content)
    superlink.clear()
    assert push(superlink, content) > len(LONG)
    assert fetch(superlink, content) == b"head" + LONG


def test_an_announcement_of_any_length_is_read_by_every_version():
    content = to_record(RequestKind.ANNOUNCEMENT, LONG)
    assert list(content) == [RequestKind.ANNOUNCEMENT.value]
    assert content[RequestKind.ANNOUNCEMENT.value]["data"] == LONG


DAMAGE = {
    "missing": lambda objects, array, chunk: objects.pop(chunk),
    "out of range": lambda objects, array, chunk: objects.update(
        {array: objects[array].replace(b"[0, 1", b"[9, 1")}
    ),
    "another form": lambda objects, array, chunk: objects.update(
        {array: objects[array].replace(b"[0, 1", b"{0, 1")}
    ),
    "another kind": lambda objects, array, chunk: objects.update({chunk: b"Config" + objects[chunk][10:]}),
    "no end of its head": lambda objects, array, chunk: objects.update({chunk: b"ArrayChunk"}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_answer_whose_chunks_are_damaged_does_not_end_the_server(damage):
    content = to_record(RequestKind.EXCHANGE, LONG)
    nested = get_all_nested_objects(content)
    kinds = {type(each).__name__: name for name, each in nested.items()}
    objects = {name: each.deflate() for name, each in nested.items()}
    damage(objects, kinds["Array"], kinds["ArrayChunk"])
    grid = SimpleNamespace(pull_messages=lambda _: [inflate_object_from_contents(content.object_id, objects)])
    assert list(GridEngine(grid, lambda *_: content).pull(["id"])) == []


def test_a_chunk_that_comes_twice_is_refused_by_its_digest(tmp_path):
    content = to_record(RequestKind.EXCHANGE, *ExchangeRequest(frame(*HEAD, LONG), 1.0, 2.0).split(blob_of(LONG)))
    content["blob"]["blob"].data += LONG[1 : 5 << 20]
    with pytest.raises(PeerError, match="must have the digest"):
        ExchangeRequest.decode(from_record(content)[1], Blobs(tmp_path))


def test_an_engine_sends_a_request_and_then_its_end():
    sent = []
    grid = SimpleNamespace(push_messages=lambda messages: [sent.extend(messages) or "id"])
    engine = GridEngine(grid, lambda content, *_: content)
    for head, end in ((b"a", LONG), (b"b", LONG[1:]), (b"c", b"")):
        assert engine.push(RequestKind.EXCHANGE, head, 7, "name", 1.0, blob=end) == "id"
    assert [from_record(content)[1] for content in sent] == [b"a" + LONG, b"b" + LONG[1:], b"c"]


@pytest.mark.parametrize(
    "end", [ConfigRecord({"blob": b"bytes"}), ArrayRecord({}), ArrayRecord({"other": Array(np.zeros(1))})]
)
def test_an_end_of_another_form_is_refused(end):
    content = RecordDict({RequestKind.EXCHANGE.value: ConfigRecord({"data": b"head"}), "blob": end})
    with pytest.raises(PeerError, match="must have one array of bytes"):
        from_record(content)


def test_what_is_longer_than_a_frame_may_be_is_refused_on_both_sides(monkeypatch):
    for module in (requests, transport):
        monkeypatch.setattr(module, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(PeerError, match="a frame must have a size of at most 1000, got 1001"):
        ExchangeRequest.decode(bytes(1001))
    answers = [
        Answer(name, 7, RequestKind.EXCHANGE, bytes(size)) for name, size in (("fits", 1000), ("long", 1001))
    ]
    server = Transport(SimpleNamespace(pull=lambda _: answers), Pace(0.1))
    found = dict(server.pull(RequestKind.EXCHANGE, "MASK_REQUEST", {"fits": 7, "long": 7}))
    assert found == {"fits": bytes(1000), "long": None}
    assert server.refusals == {"malformed": 1}
