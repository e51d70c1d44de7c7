"""A second implementation of the client and the unmasking, from docs/protocol.md alone, held against the vectors.

It imports nothing of the package but the machines that the vectors are replayed through.
"""

import hashlib
import hmac
import json
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from d2pfed.errors import PeerError
from support.vectors_secagg import FOLDER, ROUNDS, make_bad, make_federation, make_round

PRIME = 2**256 + 297
AUTHORITY = Ed25519PrivateKey.from_private_bytes(
    hashlib.sha256(b"s" + struct.pack(">Q", 9) + b"authority").digest()
).public_key()


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
    width = 1 if bits <= 8 else 2 if bits <= 16 else 4
    stream = keystream(key, dimension * width)
    words = [int.from_bytes(stream[at : at + width], "little") for at in range(0, len(stream), width)]
    return [word % 2**bits for word in words]


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
        self.ids, self.size = ids, len(self.cohort)
        limits = (self.dimension, self.bits, self.threshold, self.quorum, self.colluders)
        name = (bytes.fromhex(self.plan_digest), self.run, self.round, self.attempt)
        drawn = (bytes.fromhex(self.roster_digest), self.draw, self.block, ids)
        self.digest = digest("d2pfed session", *name, *drawn, *limits, self.delivery, self.consistency)
        self.signed = self.consistency == "signed"
        self.model, self.task = bytes.fromhex(vector["model"]), bytes.fromhex(vector["task"])
        self.everyone = bitmap([True] * self.size)
        self.leaves = [self.statement(client) for client in self.cohort]
        self.advertisements_digest = digest("d2pfed adverts", self.everyone, *self.leaves)
        self.survivors = [client in vector["survivors"] for client in self.cohort]

    def others(self, rank):
        return [other for other in range(self.size) if other != rank]

    def secrets(self, client):
        entropy = bytes.fromhex(self.v["entropy"][str(client)])
        fresh = child(entropy, "d2pfed client", self.digest, client)
        return {name: child(fresh, name) for name in ("seal", "mask", "self", "shares")}

    def sign(self, client, statement):
        if not self.signed:
            return b""
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.v["signing"][str(client)])).sign(statement)

    def frame(self, kind, client, body):
        header = struct.pack("<4sBBHQQ", b"d2pf", 2, kind, 0, client, len(body)) + self.digest
        return header + hashlib.sha256(header + body).digest()[:16] + body

    def keys_of(self, client):
        own = self.secrets(client)
        commitment = digest("d2pfed commitment", self.digest, client, own["self"])
        position = bytes.fromhex(self.v["positions"][str(client)]) if self.signed else b""
        return x25519(own["seal"]), x25519(own["mask"]), commitment, position

    def statement(self, client):
        return digest("d2pfed advert", self.digest, client, *self.keys_of(client))

    def advertisement(self, client):
        return b"".join(self.keys_of(client)) + self.sign(client, self.statement(client))

    def shares(self, client):
        """(share of the seed, share of the mask key) by holder's rank."""
        own = self.secrets(client)
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
            columns.append([self.evaluate(polynomial, place + 1) for place in range(self.size)])
        return dict(enumerate(zip(*columns, strict=True)))

    @staticmethod
    def evaluate(polynomial, point):
        value = 0
        for coefficient in polynomial:
            value = (value * point + coefficient) % PRIME
        return value

    def claim(self, sender, receiver):
        return bytes.fromhex(self.v["known"].get(str(sender), {}).get(str(receiver), ""))

    def ciphertext(self, sender, receiver):
        pair = self.shares(sender)[self.cohort.index(receiver)]
        contribution = child(self.secrets(sender)["shares"], "group") if self.delivery == "everyone" else b""
        plain = b"".join(share.to_bytes(33, "little") for share in pair) + contribution
        shared = x25519(self.secrets(sender)["seal"], x25519(self.secrets(receiver)["seal"]))
        key = hkdf(shared, "d2pfed box", self.digest, sender, receiver)
        return AESGCM(key).encrypt(bytes(12), plain + self.claim(sender, receiver), None)

    def passed_on(self, sender, receiver):
        ciphertext = self.ciphertext(sender, receiver)
        return bytes(len(ciphertext)) if [sender, receiver] in self.v["spoilt"] else ciphertext

    def ciphertexts(self, pairs, other_end, ciphertext):
        """The bitmap of claims, if signed, and a ciphertext for each pair of sender and receiver."""
        carrying = {pair[other_end] for pair in pairs if self.claim(*pair)}
        claims = bitmap([client in carrying for client in self.cohort]) if self.signed else b""
        return claims + b"".join(ciphertext(*pair) for pair in pairs)

    @property
    def context(self):
        trained = digest("d2pfed model", self.model), digest("d2pfed task", self.task)
        return digest("d2pfed context", self.digest, self.advertisements_digest, *trained, self.everyone)

    def group_hash(self):
        if self.delivery != "everyone":
            return b""
        contributions = [child(self.secrets(other)["shares"], "group") for other in self.cohort]
        return digest("d2pfed group hash", digest("d2pfed group seed", self.digest, *contributions))

    def masked(self, client):
        own, group = self.secrets(client), self.group_hash()
        values = list(self.v["vectors"][str(client)])
        terms = [(1, hkdf(own["self"], "d2pfed self mask", self.context, client))]
        for rank in self.others(self.cohort.index(client)):
            other = self.cohort[rank]
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
        return self.context + group + packed.to_bytes((self.dimension * self.bits + 7) // 8, "little")

    def invitation(self, client):
        counters = struct.pack("<IIII", self.round, self.attempt, self.draw, self.block)
        remembered = bytes.fromhex(self.v["remembered"].get(str(client), "")) or bytes(104)
        drawn = b"".join(map(bytes.fromhex, self.v["opening"])) or self.ids
        return bytes([len(self.run.encode())]) + self.run.encode() + counters + remembered + drawn

    def signature(self, client):
        return self.sign(client, digest("d2pfed survivors", self.context, bitmap(self.survivors)))

    def exchanges(self, client):
        """All that this client is asked and answers, in order."""
        rank, cohort = self.cohort.index(client), self.cohort
        yield self.frame(1, client, self.invitation(client)), self.frame(2, client, self.advertisement(client))
        shown = b"".join(self.advertisement(cohort[other]) for other in range(self.size))
        sent = self.ciphertexts([(client, cohort[other]) for other in self.others(rank)], 1, self.ciphertext)
        yield self.frame(3, client, self.everyone + shown), self.frame(4, client, sent)
        if client not in self.v["survivors"]:
            return
        got = self.ciphertexts([(cohort[other], client) for other in self.others(rank)], 0, self.passed_on)
        trained = struct.pack("<I", len(self.task)) + self.task + self.model
        yield self.frame(5, client, self.everyone + got + trained), self.frame(6, client, self.masked(client))
        request = bitmap(self.survivors)
        if self.signed:
            yield self.frame(7, client, request), self.frame(8, client, self.signature(client))
            request += b"".join(self.signature(signer) for signer in self.v["survivors"])
        missing = [[cohort[owner], client] in self.v["spoilt"] for owner in range(self.size)]
        opened = [
            self.shares(cohort[owner])[rank][0 if self.survivors[owner] else 1]
            for owner in range(self.size)
            if not missing[owner]
        ]
        answer = bitmap(missing) + b"".join(share.to_bytes(33, "little") for share in opened)
        yield self.frame(9, client, request), self.frame(10, client, answer)


@pytest.mark.parametrize("name", ROUNDS)
def test_a_second_implementation_sends_the_same_bytes(name):
    vector = load(name)
    second = Second(vector)
    assert second.digest.hex() == vector["digest"]
    assert second.advertisements_digest.hex() == vector["adverts_digest"]
    for client in second.cohort:
        logged = [
            (entry["request"], entry["answer"]) for entry in vector["exchanges"] if entry["client"] == client
        ]
        assert [(request.hex(), answer.hex()) for request, answer in second.exchanges(client)] == logged


@pytest.mark.parametrize("name", [name for name in ROUNDS if load(name)["roster"]])
def test_a_second_implementation_reads_the_roster_and_the_positions(name):
    vector = load(name)
    frame = bytes.fromhex(vector["roster"])
    body, signature = frame[72:-64], frame[-64:]
    assert frame[:8] == b"d2pf\x02\x20\0\0"
    assert digest("d2pfed roster", body).hex() == vector["session"]["roster_digest"]
    AUTHORITY.verify(signature, digest("d2pfed roster", body))
    serial, issued, expires, _nonce, depth, root, count = struct.unpack_from("<QQQ32sB32sI", body)
    ids = struct.unpack_from(f"<{count}Q", body, 93)
    keys = [body[93 + 8 * count + 32 * place :][:32] for place in range(count)]
    assert (serial, expires - issued) == (1, 30 * 86_400)
    assert len(body) == 93 + (8 + 32 + 40) * count
    authority = AUTHORITY.public_bytes_raw()
    for client, packed in vector["positions"].items():
        position = bytes.fromhex(packed)
        rows, head = struct.unpack_from("<Q32s", position)
        statement = digest("d2pfed position", authority, int(client), rows, head)
        Ed25519PublicKey.from_public_bytes(keys[ids.index(int(client))]).verify(position[40:], statement)
    if depth != 255:
        check_draw(vector, ids, depth, root)


def check_draw(vector, ids, depth, root):
    """The path leads from the seed to the root, and the cohort is the first of the order."""
    seed, *nodes = map(bytes.fromhex, vector["opening"])
    place = draw = vector["session"]["draw"]
    assert len(nodes) == depth
    reached = digest("d2pfed draw leaf", draw, seed)
    for beside in nodes:
        pair = (beside, reached) if place % 2 else (reached, beside)
        reached, place = digest("d2pfed draw node", *pair), place // 2
    assert reached == root
    key = digest("d2pfed draw", bytes.fromhex(vector["session"]["roster_digest"]), draw, seed)
    words = struct.unpack(f"<{len(ids)}Q", keystream(key, 8 * len(ids)))
    order = sorted(range(len(ids)), key=lambda position: words[position])
    assert sorted(ids[position] for position in order[:4]) == vector["session"]["cohort"]


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
    federation = make_federation("complete")
    client = federation.session.cohort[0]
    machine = federation.clients[client]
    own = [entry["request"] for entry in vector["exchanges"] if entry["client"] == client]
    for request in own[: case["place"]]:
        machine.receive(bytes.fromhex(request))
    with pytest.raises(PeerError):
        machine.receive(bytes.fromhex(case["request"]))
