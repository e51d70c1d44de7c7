"""A second implementation of the lattice protocol, from docs/protocol.md alone, held against the vectors.

It computes with whole numbers only, and imports nothing of the package but what makes the vectors.
"""

import hashlib
import json
import struct
from functools import cached_property

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from d2pfed.secagg.lattice import masks
from d2pfed.secagg.lattice import session as sessions
from support.lattice import quick
from support.vectors_lattice import FILE, ROUNDS, make, make_round
from test_secagg_vectors import bitmap, child, digest, hkdf, keystream, mask, x25519

P = 65_521


def field(key, count):
    words = struct.unpack(f"<{count + 64}H", keystream(key, 2 * (count + 64)))
    return [word for word in words if word < P][:count]


def pack(elements):
    return struct.pack(f"<{len(elements)}H", *elements)


def ids(clients):
    return struct.pack(f"<I{len(clients)}Q", len(clients), *clients)


def value_at(known, values, point):
    """The polynomial through these values, at one point (Lagrange)."""
    total = 0
    for place, x in enumerate(known):
        above = below = 1
        for y in known[:place] + known[place + 1 :]:
            above, below = above * (point - y) % P, below * (x - y) % P
        total += values[place] * above * pow(below, -1, P)
    return total % P


def framed(kind, client, binding, body):
    header = struct.pack("<4sBBHQQ", b"d2pf", 2, kind, 0, client, len(body)) + binding
    return header + hashlib.sha256(header + body).digest()[:16] + body


class Second:
    """One attempt, by the book."""

    def __init__(self, vector):
        self.v = vector
        for name, value in vector["session"].items():
            setattr(self, name, value)
        self.signed = any(bytes.fromhex(self.roster_digest))
        self.count = -(-self.secret // self.packed)
        self.openers = self.packed + self.threshold
        self.task, self.model = bytes.fromhex(vector["task"]), bytes.fromhex(vector["model"])
        self.present = [
            int(member)
            for member in self.members
            if str(member) in vector["messages"]["agree" if self.signed else "open"]
        ]
        self.survivors = vector["survivors"]
        self.identities = dict(zip(self.cohort, vector["identities"], strict=True))

    @cached_property
    def digest(self):
        name = bytes.fromhex(self.plan_digest), self.run, self.round, self.attempt
        drawn = bytes.fromhex(self.roster_digest), self.draw, self.block, ids(self.cohort), ids(self.members)
        shares = self.secret, self.threshold, self.packed, self.certificate
        limits = self.dimension, self.bits, *shares, self.quorum, self.colluders, self.committee_colluders
        label = "d2pfed lattice session by slot" if self.is_by_slot else "d2pfed lattice session"
        return digest(label, *name, *drawn, *limits)

    @cached_property
    def authority(self):
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.v["authority"]))

    def certified(self, slot):
        """What the authority says of a slot; nothing where clients hold the roster, or nobody is enrolled."""
        if not self.is_by_slot:
            return b""
        client, secret = self.identities[slot], bytes.fromhex(self.v["signing"][str(slot)])
        key = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        statement = digest("d2pfed enrolment", bytes.fromhex(self.roster_digest), slot, client, key)
        return struct.pack("<Q", client) + key + self.authority.sign(statement)

    def frame(self, kind, client, body):
        return framed(kind, client, self.digest, body)

    def sign(self, client, statement):
        if not self.signed:
            return b""
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.v["signing"][str(client)])).sign(statement)

    # --- convene ---

    def invitation(self, client):
        run = self.run.encode()
        numbers = struct.pack("<IIII", self.round, self.attempt, self.draw, self.block)
        remembered = bytes.fromhex(self.v["remembered"].get(str(client), bytes(104).hex()))
        return bytes([len(run)]) + run + numbers + remembered + ids(self.cohort)

    def member_key(self, member):
        return bytes.fromhex(self.v["members"][str(member)])

    def advert(self, member):
        key = x25519(self.member_key(member))
        return key + self.sign(member, digest("d2pfed lattice advert", self.digest, member, key))

    # --- contribute ---

    @cached_property
    def subset(self):
        return bitmap([member in self.present for member in self.members])

    @cached_property
    def context(self):
        keys = (x25519(self.member_key(member)) for member in self.present)
        trained = digest("d2pfed model", self.model), digest("d2pfed task", self.task)
        return digest("d2pfed lattice context", self.digest, self.subset, *keys, *trained)

    @cached_property
    def adverts(self):
        return self.subset + b"".join(self.advert(member) + self.certified(member) for member in self.present)

    def voucher(self, member):
        keys = (x25519(self.member_key(member)) for member in self.present)
        return self.sign(member, digest("d2pfed lattice adverts", self.digest, self.subset, *keys))

    @cached_property
    def vouched(self):
        """The first threshold + 1 members' words for all keys; nothing where nobody is enrolled."""
        if not self.signed:
            return b""
        asked = [member for member in self.present if str(member) in self.v["messages"]["vouch"]]
        asked = [member for member in asked if member != self.v["silent"]][: self.threshold + 1]
        signed = b"".join(self.certified(member) + self.voucher(member) for member in asked)
        return bitmap([member in asked for member in self.members]) + signed

    def request(self, client):
        keys = b"".join(x25519(self.member_key(member)) for member in self.present)
        task = struct.pack("<I", len(self.task)) + self.task + digest("d2pfed model", self.model)
        return self.invitation(client) + self.subset + keys + self.vouched + task

    def drawn(self, client):
        return self.v["clients"][str(client)]

    def position(self, client):
        return bytes.fromhex(self.v["positions"][str(client)]) if self.signed else b""

    def key(self, client):
        return x25519(bytes.fromhex(self.drawn(client)["key"]))

    def signature(self, client):
        bound = self.digest, self.context, client, self.key(client), self.position(client)
        return self.sign(client, digest("d2pfed lattice contribution", *bound))

    @cached_property
    def lagrange(self):
        """For polynomials given at 1 to n, what each of these values counts at each member's point."""
        points = [self.openers + 1 + place for place in range(len(self.members))]
        found = {}
        for size in (self.openers, 16 + self.threshold):
            known = list(range(1, size + 1))
            unit = [[int(row == column) for column in range(size)] for row in range(size)]
            found[size] = [[value_at(known, row, point) for row in unit] for point in points]
        return found

    def shares(self, client, place):
        drawn = self.drawn(client)
        padded = [number % P for number in drawn["secret"]] + [0] * (self.count * self.packed - self.secret)
        polynomials = [
            padded[number * self.packed : (number + 1) * self.packed] + drawn["uniform"][number]
            for number in range(self.count)
        ]
        polynomials += [drawn["seed"] + drawn["seed_uniform"], drawn["blinding"]]
        return [
            sum(factor * value for factor, value in zip(self.lagrange[len(values)][place], values, strict=True))
            % P
            for values in polynomials
        ]

    def pads(self, client, member):
        shared = x25519(self.member_key(member), self.key(client))
        return field(hkdf(shared, "d2pfed lattice pads", self.context, client, member), self.count + 2)

    def boxes(self, client):
        joined = b""
        for member in self.present:
            shares, pads = self.shares(client, self.members.index(member)), self.pads(client, member)
            joined += pack([(share + pad) % P for share, pad in zip(shares, pads, strict=True)])
        return joined

    @cached_property
    def matrix(self):
        numbers = mask(child(self.context, "d2pfed lattice matrix"), self.dimension * self.secret, self.bits)
        return [numbers[row * self.secret : (row + 1) * self.secret] for row in range(self.dimension)]

    def times(self, secret):
        return [sum(a * s for a, s in zip(row, secret, strict=True)) for row in self.matrix]

    def veil(self, client):
        key = hkdf(pack(self.drawn(client)["seed"]), "d2pfed lattice veil", self.context, client)
        return mask(key, self.dimension, self.bits)

    def masked(self, client):
        drawn = self.drawn(client)
        parts = zip(drawn["vector"], self.times(drawn["secret"]), self.veil(client), strict=True)
        return [sum(part) % 2**self.bits for part in parts]

    def contribution(self, client):
        commitment = digest("d2pfed lattice commitment", self.context, client, pack(self.drawn(client)["seed"]))
        shown = self.context + self.key(client) + commitment + self.position(client) + self.signature(client)
        vector = sum(value << (place * self.bits) for place, value in enumerate(self.masked(client)))
        size = (self.dimension * self.bits + 7) // 8
        return shown + self.boxes(client) + vector.to_bytes(size, "little")

    # --- agree and open ---

    @cached_property
    def subset_of_survivors(self):
        return bitmap([client in self.survivors for client in self.cohort])

    @cached_property
    def shown_survivors(self):
        listed = (
            self.certified(client) + self.key(client) + self.position(client) + self.signature(client)
            for client in self.survivors
        )
        return self.context + bytes.fromhex(self.v["nonce"]) + self.subset_of_survivors + b"".join(listed)

    @cached_property
    def statement(self):
        keys = (self.key(client) for client in self.survivors)
        bound = self.digest, self.context, bytes.fromhex(self.v["nonce"]), self.subset_of_survivors
        return digest("d2pfed lattice opening", *bound, *keys)

    @cached_property
    def certificate_shown(self):
        signatures = (self.certified(member) + self.sign(member, self.statement) for member in self.present)
        return self.subset + b"".join(signatures)

    def opening(self, member):
        pads = [self.pads(client, member) for client in self.survivors]
        sums = [sum(column) % P for column in list(zip(*pads, strict=True))[: self.count]]
        return pack(sums) + pack([each[self.count] for each in pads])

    def trace(self, member):
        coefficients = field(child(self.statement, "d2pfed lattice trace"), self.count)
        combined = []
        for client in self.survivors:
            pads = self.pads(client, member)
            total = sum(c * pad for c, pad in zip(coefficients, pads[: self.count], strict=True))
            combined.append((total + pads[self.count + 1]) % P)
        return pack(combined)

    def expected(self, exchange, client):
        """Request and answer of one exchange."""
        if exchange == "convene":
            return self.frame(1, client, self.invitation(client)), self.frame(17, client, self.advert(client))
        if exchange == "vouch":
            return self.frame(26, client, self.adverts), self.frame(27, client, self.voucher(client))
        if exchange == "contribute":
            return self.frame(18, client, self.request(client)), self.frame(19, client, self.contribution(client))
        if exchange == "agree":
            signature = self.sign(client, self.statement)
            return self.frame(20, client, self.shown_survivors), self.frame(21, client, signature)
        if exchange == "trace":
            return self.frame(24, client, b""), self.frame(25, client, self.trace(client))
        shown = (
            self.frame(22, client, self.certificate_shown)
            if self.signed
            else self.frame(20, client, self.shown_survivors)
        )
        return shown, self.frame(23, client, self.opening(client))

    def opened(self):
        """The sum, from boxes and openings alone."""
        members = [member for member in self.present if str(member) in self.v["messages"]["open"]][
            1 : self.openers + 1
        ]
        points = [self.openers + 1 + self.members.index(member) for member in members]
        words = []
        for member in members:
            place = self.members.index(member)
            rows = [
                [
                    (share + pad) % P
                    for share, pad in zip(self.shares(client, place), self.pads(client, member), strict=True)
                ]
                for client in self.survivors
            ]
            pads = struct.unpack(f"<{self.count + len(rows)}H", self.opening(member))
            words.append([(sum(row[j] for row in rows) - pads[j]) % P for j in range(self.count)])
        secret = []
        for j in range(self.count):
            column = [word[j] for word in words]
            secret += [value_at(points, column, x) for x in range(1, self.packed + 1)]
        assert not any(secret[self.secret :])
        secret = [(value + P // 2) % P - P // 2 for value in secret[: self.secret]]
        assert max(map(abs, secret)) <= 128 * len(self.survivors) ** 0.5
        columns = zip(*(self.masked(client) for client in self.survivors), strict=True)
        veils = zip(*(self.veil(client) for client in self.survivors), strict=True)
        parts = zip(columns, veils, self.times(secret), strict=True)
        return [(sum(column) - sum(veil) - product) % 2**self.bits for column, veil, product in parts]


@pytest.fixture(scope="module")
def vectors():
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def seconds(vectors):
    return {name: Second(vector) for name, vector in vectors.items()}


def test_the_vectors_are_what_the_package_makes(vectors, monkeypatch):
    quick(monkeypatch)
    assert json.loads(json.dumps(make())) == vectors


@pytest.mark.parametrize("name", ROUNDS)
def test_digests(vectors, seconds, name):
    second, vector = seconds[name], vectors[name]
    assert second.digest.hex() == vector["digest"]
    assert second.context.hex() == vector["context"]
    assert second.statement.hex() == vector["statement"]


@pytest.mark.parametrize("exchange", ["convene", "vouch", "contribute", "agree", "open", "trace"])
@pytest.mark.parametrize("name", ROUNDS)
def test_every_message(vectors, seconds, name, exchange):
    vector, second = vectors[name], seconds[name]
    for client, found in vector["messages"][exchange].items():
        expected = second.expected(exchange, int(client))
        assert found == [hashlib.sha256(data).hexdigest() for data in expected], client
    whole = second.members[0]
    if exchange in vector["whole"]:
        assert vector["whole"][exchange] == [data.hex() for data in second.expected(exchange, whole)]


def test_head_and_slip(vectors, seconds):
    """By the book: what a client holds that does not hold the roster."""
    second, vector = seconds["by slot"], vectors["by slot"]
    roster, head, slip = (bytes.fromhex(text) for text in (second.roster_digest, vector["head"], vector["slip"]))
    times = struct.pack("<QQQ", 1, 1_800_000_000, 1_800_000_000 + 30 * 86_400)
    body = times + b"\xff" + bytes(32) + struct.pack("<I", 52) + roster
    body += second.authority.sign(digest("d2pfed roster head", body))
    assert head == framed(33, 0, bytes(32), body)
    slot = second.cohort[0]
    client, public = second.identities[slot], second.authority.public_key().public_bytes_raw()
    floor = 0, digest("d2pfed log", public, client)
    signed = second.authority.sign(digest("d2pfed floor", roster, client, *floor))
    body = struct.pack("<I", slot) + second.certified(slot) + struct.pack("<Q", 0) + floor[1] + signed
    assert slip == framed(34, client, roster, body)


@pytest.mark.parametrize("name", ROUNDS)
def test_the_sum_from_boxes_and_openings(vectors, seconds, name):
    second, vector = seconds[name], vectors[name]
    columns = zip(*(vector["clients"][str(client)]["vector"] for client in second.survivors), strict=True)
    assert vector["sum"] == [sum(column) % 2**second.bits for column in columns]
    assert second.opened() == vector["sum"]


CHANGES = [(masks, "pads"), (masks, "veil"), (sessions, "opening_statement"), (sessions, "commitment")]


@pytest.mark.parametrize(("module", "name"), CHANGES)
def test_a_change_of_any_derivation_changes_the_vectors(vectors, monkeypatch, module, name):
    quick(monkeypatch)
    kept = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: kept(*_exchanged(given)))
    made = json.loads(json.dumps(make_round(**ROUNDS["assumed"])))
    assert made["messages"] != vectors["assumed"]["messages"]


def _exchanged(given):
    """The same arguments, with another context or nonce."""
    return [digest(each) if isinstance(each, bytes) and len(each) == 32 else each for each in given]
