"""A second implementation of standing keys, from docs/protocol.md alone, held against the vectors."""

import hashlib
import json
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from d2pfed.secagg.standing import epoch as epochs
from support.vectors_standing import FILE, make
from test_secagg_vectors import bitmap, child, digest, hkdf, keystream, mask, x25519


class Second:
    """An epoch, by the book."""

    def __init__(self, vector):
        self.v = vector
        for name, value in vector["epoch"].items():
            setattr(self, name, value)
        ids = struct.pack(f"<I{len(self.silos)}Q", len(self.silos), *self.silos)
        name = bytes.fromhex(self.plan_digest), self.run, self.epoch, self.first, bytes.fromhex(self.roster_digest)
        limits = self.dimension, self.bits, self.quorum, self.colluders, self.rounds, self.attempts
        self.ids, self.digest = ids, digest("d2pfed standing epoch", *name, ids, *limits)
        self.task, self.model = bytes.fromhex(vector["task"]), bytes.fromhex(vector["model"])
        everyone = bitmap([True] * len(self.silos))
        self.adverts = [self.advert(client) for client in self.silos]
        self.keys_digest = digest("d2pfed standing keys", self.digest, everyone, *self.adverts)

    def frame(self, kind, client, body):
        header = struct.pack("<4sBBHQQ", b"d2pf", 2, kind, 0, client, len(body)) + self.digest
        return header + hashlib.sha256(header + body).digest()[:16] + body

    def secret(self, client):
        return child(bytes.fromhex(self.v["entropy"][str(client)]), "d2pfed standing client", self.digest, client)

    def advert(self, client):
        public, position = x25519(self.secret(client)), bytes.fromhex(self.v["positions"][str(client)])
        statement = digest("d2pfed standing advert", self.digest, client, public, position)
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.v["signing"][str(client)]))
        return public + position + key.sign(statement)

    def invitation(self, client):
        run = self.run.encode()
        body = bytes([len(run)]) + run + struct.pack("<IIQ", self.epoch, self.first, self.serial)
        return self.frame(11, client, body + self.ids + bytes(104))

    def adverts_for(self, client):
        return self.frame(13, client, bitmap([True] * len(self.silos)) + b"".join(self.adverts))

    def members(self, step):
        return bitmap([client in step["members"] for client in self.silos])

    def context(self, step):
        trained = digest("d2pfed model", self.model), digest("d2pfed task", self.task)
        numbers = step["round"], step["attempt"], self.members(step)
        return digest("d2pfed standing context", self.keys_digest, *numbers, *trained)

    def request(self, client, step):
        numbers = struct.pack("<II", step["round"], step["attempt"])
        trained = struct.pack("<I", len(self.task)) + self.task + self.model
        return self.frame(15, client, numbers + self.members(step) + trained)

    def pad(self, client, peer, step):
        low, high = min(client, peer), max(client, peer)
        shared = x25519(self.secret(client), x25519(self.secret(peer)))
        key = hkdf(shared, "d2pfed standing pair", self.keys_digest, low, high)
        for _ in range(self.first, step["round"] * self.attempts + step["attempt"]):
            key = child(key, "d2pfed standing next")
        return mask(child(key, "d2pfed standing mask", self.context(step), low, high), self.dimension, self.bits)

    def masked(self, client, step):
        vector = list(step["vectors"][str(client)])
        for peer in step["members"]:
            if peer != client:
                sign = 1 if client < peer else -1
                pad = self.pad(client, peer, step)
                vector = [(x + sign * y) % 2**self.bits for x, y in zip(vector, pad, strict=True)]
        packed = sum(value << (place * self.bits) for place, value in enumerate(vector))
        size = (self.dimension * self.bits + 7) // 8
        return self.frame(16, client, self.context(step) + packed.to_bytes(size, "little"))


@pytest.fixture(scope="module")
def vector():
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def second(vector):
    return Second(vector)


def test_the_vectors_are_what_the_package_makes(vector):
    assert json.loads(json.dumps(make())) == vector


def test_digests(vector, second):
    assert second.digest.hex() == vector["digest"]
    assert second.keys_digest.hex() == vector["keys_digest"]


def test_every_message_of_the_set_up(vector, second):
    expected = []
    for client in second.silos:
        answer = second.frame(12, client, second.advert(client))
        expected.append({"client": client, "request": second.invitation(client).hex(), "answer": answer.hex()})
    for client in second.silos:
        answer = second.frame(14, client, second.keys_digest)
        expected.append({"client": client, "request": second.adverts_for(client).hex(), "answer": answer.hex()})
    assert vector["set_up"] == expected


def test_every_message_of_the_steps(vector, second):
    for step in vector["steps"]:
        expected = [
            {
                "client": client,
                "request": second.request(client, step).hex(),
                "answer": second.masked(client, step).hex(),
            }
            for client in step["members"]
        ]
        assert step["exchange"] == expected


def test_every_sum(vector, second):
    for step in vector["steps"]:
        columns = zip(*step["vectors"].values(), strict=True)
        assert step["sum"] == [sum(column) % 2**second.bits for column in columns]


@pytest.mark.parametrize("name", ["pair_key", "next_pair_key", "context", "mask_key"])
def test_a_change_of_any_derivation_changes_the_vectors(vector, monkeypatch, name):
    kept = getattr(epochs, name)
    monkeypatch.setattr(epochs, name, lambda *given: keystream(kept(*given), 32))
    assert json.loads(json.dumps(make())) != vector
