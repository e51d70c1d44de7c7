"""A second implementation of the client and the unmasking, from docs/protocol.md alone, held against the vectors.

It imports nothing of the package but the machines that the vectors are replayed through.
"""

import hashlib
import hmac
import json
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from d2pfed.errors import PeerError
from federation import Federation, make_session
from vectors_secagg import FOLDER, ROUNDS, make_bad, make_round

PRIME = 2**256 + 297


def load(name):
    return json.loads((FOLDER / f"secagg_{name}.json").read_text())


# --- the derivations ---


def path(*parts):
    joined = b""
    for part in parts:
        tag = {bytes: b"b", str: b"s", int: b"i"}[type(part)]
        body = part if isinstance(part, bytes) else str(part).encode()
        joined += tag + struct.pack(">Q", len(body)) + body
    return joined


def digest(*parts):
    return hashlib.sha256(path(*parts)).digest()


def child(key, *parts):
    return hmac.digest(key, path(*parts) + b"\x01", "sha256")


def hkdf(secret, *parts):
    return child(hmac.digest(bytes(32), secret, "sha256"), *parts)


def keystream(key, count):
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(count))


def mask(key, dimension, bits):
    stream = int.from_bytes(keystream(key, (dimension * bits + 7) // 8), "little")
    return [(stream >> (bits * place)) % 2**bits for place in range(dimension)]


def bitmap(flags):
    value = sum(1 << place for place, flag in enumerate(flags) if flag)
    return value.to_bytes((len(flags) + 7) // 8, "little")


def x25519(secret, public=None):
    key = X25519PrivateKey.from_private_bytes(secret)
    return (
        key.exchange(X25519PublicKey.from_public_bytes(public)) if public else key.public_key().public_bytes_raw()
    )


class Second:
    """One session, by the book."""

    def __init__(self, vector):
        self.v = vector
        for name, value in vector["session"].items():
            setattr(self, name, value)
        ids = struct.pack(f"<I{len(self.cohort)}Q", len(self.cohort), *self.cohort)
        self.ids = ids
        limits = (self.dimension, self.bits, self.degree, self.threshold, self.quorum)
        name = (bytes.fromhex(self.plan_digest), self.run, self.round, self.attempt, ids)
        self.digest = digest("d2pfed session", *name, *limits, self.delivery, self.consistency)
        self.signed = self.consistency == "signed"
        self.model = bytes.fromhex(vector["model"])
        size = len(self.cohort)
        words = struct.unpack(f"<{size}Q", keystream(digest("d2pfed graph", self.digest), 8 * size))
        circle = sorted(range(size), key=lambda rank: words[rank])
        self.holders = {}
        for rank in range(size):
            at = circle.index(rank)
            near = [circle[(at + step) % size] for step in range(-(self.degree // 2), self.degree // 2 + 1)]
            self.holders[rank] = sorted(near) if self.degree < size - 1 else list(range(size))

    def secrets(self, client):
        entropy = bytes.fromhex(self.v["entropy"][str(client)])
        fresh = child(entropy, "d2pfed client", self.digest, client)
        return {name: child(fresh, name) for name in ("seal", "mask", "self", "shares")}

    def sign(self, client, statement):
        if not self.signed:
            return b""
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.v["signing"][str(client)])).sign(statement)

    def frame(self, kind, client, body):
        header = struct.pack("<4sBBHQQ", b"d2pf", 1, kind, 0, client, len(body)) + self.digest
        return header + hashlib.sha256(header + body).digest()[:16] + body

    def advert(self, client):
        own = self.secrets(client)
        seal, masks = x25519(own["seal"]), x25519(own["mask"])
        commitment = digest("d2pfed commitment", self.digest, client, own["self"])
        statement = digest("d2pfed advert", self.digest, client, seal, masks, commitment)
        return seal + masks + commitment + self.sign(client, statement)

    def shares(self, client):
        """(share of the seed, share of the mask key) by holder's rank."""
        own, rank = self.secrets(client), self.cohort.index(client)
        stream, used = keystream(child(own["shares"], "coefficients"), 100_000), 0
        columns = []
        for secret in (own["self"], own["mask"]):
            coefficients = []
            while len(coefficients) < self.threshold - 1:
                draw = int.from_bytes(stream[used : used + 33], "little") >> 7
                used += 33
                if draw < PRIME:
                    coefficients.append(draw)
            polynomial = [*coefficients, int.from_bytes(secret, "little")]
            columns.append([self.evaluate(polynomial, place + 1) for place in range(len(self.holders[rank]))])
        return dict(zip(self.holders[rank], zip(*columns, strict=True), strict=True))

    @staticmethod
    def evaluate(polynomial, point):
        value = 0
        for coefficient in polynomial:
            value = (value * point + coefficient) % PRIME
        return value

    def plain(self, sender, receiver):
        pair = self.shares(sender)[self.cohort.index(receiver)]
        contribution = child(self.secrets(sender)["shares"], "group") if self.delivery == "everyone" else b""
        return b"".join(share.to_bytes(33, "little") for share in pair) + contribution

    def box(self, sender, receiver):
        shared = x25519(self.secrets(sender)["seal"], x25519(self.secrets(receiver)["seal"]))
        key = hkdf(shared, "d2pfed box", self.digest, sender, receiver)
        return AESGCM(key).encrypt(bytes(12), self.plain(sender, receiver), None)

    @property
    def context(self):
        everyone = bitmap([True] * len(self.cohort))
        return digest("d2pfed context", self.digest, digest("d2pfed model", self.model), everyone)

    def masked(self, client):
        own, group = self.secrets(client), b""
        if self.delivery == "everyone":
            contributions = [child(self.secrets(other)["shares"], "group") for other in self.cohort]
            group = digest("d2pfed group hash", digest("d2pfed group seed", self.digest, *contributions))
        values = list(self.v["vectors"][str(client)])
        terms = [(1, hkdf(own["self"], "d2pfed self mask", self.context, client))]
        for rank in self.holders[self.cohort.index(client)]:
            other = self.cohort[rank]
            if other != client:
                shared = x25519(own["mask"], x25519(self.secrets(other)["mask"]))
                low, high = min(client, other), max(client, other)
                key = hkdf(shared, "d2pfed pair mask", self.context, low, high, group)
                terms.append((1 if client == low else -1, key))
        for sign, key in terms:
            values = [
                (a + sign * b) % 2**self.bits
                for a, b in zip(values, mask(key, self.dimension, self.bits), strict=True)
            ]
        packed = sum(value << (self.bits * place) for place, value in enumerate(values))
        return self.context + packed.to_bytes((self.dimension * self.bits + 7) // 8, "little")

    def answers(self, client):
        """All that this client sends, in order."""
        rank = self.cohort.index(client)
        peers = [self.cohort[holder] for holder in self.holders[rank] if holder != rank]
        yield self.frame(2, client, self.advert(client))
        yield self.frame(4, client, b"".join(self.box(client, peer) for peer in peers))
        if client not in self.v["survivors"]:
            return
        yield self.frame(6, client, self.masked(client))
        arrived = [other in self.v["survivors"] for other in self.cohort]
        if self.signed:
            statement = digest("d2pfed survivors", self.context, bitmap(arrived))
            yield self.frame(8, client, self.sign(client, statement))
        opened = [
            self.shares(self.cohort[owner])[rank][0 if arrived[owner] else 1] for owner in self.holders[rank]
        ]
        yield self.frame(10, client, b"".join(share.to_bytes(33, "little") for share in opened))


@pytest.mark.parametrize("name", ROUNDS)
def test_a_second_implementation_sends_the_same_bytes(name):
    vector = load(name)
    second = Second(vector)
    assert second.digest.hex() == vector["digest"]
    for rank, client in enumerate(second.cohort):
        near = [second.cohort[holder] for holder in second.holders[rank] if holder != rank]
        assert near == vector["neighbours"][str(client)]
        sent = [entry["answer"] for entry in vector["exchanges"] if entry["client"] == client]
        assert [answer.hex() for answer in second.answers(client)] == sent


@pytest.mark.parametrize("name", ROUNDS)
def test_the_sum_is_that_of_the_survivors(name):
    vector = load(name)
    given = [vector["vectors"][str(client)] for client in vector["survivors"]]
    modulus = 2 ** vector["session"]["bits"]
    assert vector["sum"] == [sum(values) % modulus for values in zip(*given, strict=True)]


@pytest.mark.parametrize("name", ROUNDS)
def test_the_bytes_have_not_changed(name):
    assert load(name) == json.loads(json.dumps(make_round(name)))


def test_the_bad_requests_have_not_changed():
    assert load("bad_requests") == make_bad(load("complete"))


@pytest.mark.parametrize("case", load("bad_requests")["cases"], ids=lambda case: f"{case['place']} {case['why']}")
def test_a_bad_request_is_refused(case):
    vector = load("complete")
    shape, _ = ROUNDS["complete"]
    session = make_session(4, dimension=5, **shape)
    client = session.cohort[0]
    machine = Federation(session, seed=b"vectors").clients[client]
    own = [entry["request"] for entry in vector["exchanges"] if entry["client"] == client]
    for request in own[: case["place"]]:
        machine.receive(bytes.fromhex(request))
    with pytest.raises(PeerError):
        machine.receive(bytes.fromhex(case["request"]))
