"""Random sessions: any size, graph, delivery and consistency, dropouts anywhere, and clients that cheat."""

from dataclasses import dataclass

import numpy as np

from d2pfed.errors import TooFewClients, VoidStep
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import Client, Consistency, Delivery, Session
from d2pfed.secagg.pairwise import messages
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.shamir import PRIME
from d2pfed.secagg.wire import MessageKind, kind_of
from support.federation import Federation, expected_sum, make_session, run_round
from support.standing import Silos, make_epoch


@dataclass
class Fate:
    """What goes wrong in one session: who is lost where, and who cheats how."""

    lost: dict[str, set[int]]
    spoils_ciphertexts: set[int]
    lies_about_shares: set[int]
    stream: Stream

    @property
    def cheats(self) -> set[int]:
        return self.spoils_ciphertexts | self.lies_about_shares


def draw_session(stream: Stream, most: int = 20) -> Session:
    """A session of any kind that its rules allow, of at most so many clients."""
    size = 3 + stream.below(most - 2)
    consistency = Consistency.SIGNED if stream.below(2) else Consistency.ASSUMED
    delivery = list(Delivery)[stream.below(2)]
    threshold = size // 2 + 1
    colluders = stream.below(max(1, min(threshold, size // 4)))
    least = max((size + colluders) // 2 + 1, threshold)
    quorum = size if delivery is Delivery.EVERYONE else least + stream.below(size - least + 1)
    return make_session(
        size,
        threshold=threshold,
        quorum=quorum,
        colluders=colluders,
        delivery=delivery,
        consistency=consistency,
        bits=1 + stream.below(32),
        dimension=size + stream.below(20),
        attempt=stream.below(1000),
    )


def draw_fate(session: Session, stream: Stream) -> Fate:
    """Mostly few dropouts, sometimes none, and in some sessions clients that cheat."""
    size, spare = len(session.cohort), len(session.cohort) - session.quorum
    lost: dict[str, set[int]] = {}
    for phase in ("advertise", "share", "mask", "confirm", "unmask"):
        count = stream.below(2 + spare // 2) if stream.below(3) == 0 else 0
        lost[phase] = {session.cohort[rank] for rank in stream.subset(size, min(count, size))}
    bad = stream.below(session.colluders + 1) if stream.below(2) else 0
    cheats = [session.cohort[rank] for rank in stream.subset(size, bad)]
    spoiling = {client for client in cheats if stream.below(2)}
    return Fate(lost, spoiling, set(cheats) - spoiling, stream)


class Cheat:
    """A client whose answers are spoilt on their way out: ciphertexts to some holders, or the shares it opens."""

    def __init__(self, client: Client, rank: int, fate: Fate, name: int) -> None:
        self._client, self._rank, self._fate, self._name = client, rank, fate, name

    def receive(self, request: bytes) -> bytes:
        before = self._client.phase
        answer = self._client.receive(request)
        if kind_of(answer) == MessageKind.ENCRYPTED_SHARES and self._name in self._fate.spoils_ciphertexts:
            return self._spoil(self._client.phase.joined, answer)
        if kind_of(answer) == MessageKind.UNMASKING_SHARES and self._name in self._fate.lies_about_shares:
            held = getattr(before, "masked", before)
            opened = messages.decode_unmasking_shares(held.joined, self._rank, held.sharers, answer)
            wrong = {owner: (share + 1) % PRIME for owner, share in opened.items() if share is not None}
            return messages.encode_unmasking_shares(held.joined, self._rank, held.sharers, wrong)
        return answer

    def _spoil(self, joined, answer: bytes) -> bytes:
        sent = messages.decode_encrypted_shares(joined, self._rank, answer)
        ciphertexts = {
            rank: self._fate.stream.bytes(len(ciphertext)) if self._fate.stream.below(2) else ciphertext
            for rank, ciphertext in sent.ciphertexts.items()
        }
        return messages.encode_encrypted_shares(joined, self._rank, EncryptedShares(ciphertexts, sent.claims))


def run_session(seed: int, most: int = 20) -> str:
    """Run one session and return 'sum' or 'void'; a wrong sum, or an honest client blamed for one, fails."""
    stream = Stream(digest("a random session", seed))
    session = draw_session(stream, most)
    fate = draw_fate(session, stream)
    vectors = {
        client: session.ring.uniform(Stream(digest("update", seed, client)), session.dimension)
        for client in session.cohort
    }
    federation = Federation(session, seed=b"session %d" % seed, vectors=vectors, may_refuse=True)
    for client in fate.cheats:
        federation.clients[client] = Cheat(federation.clients[client], session.rank(client), fate, client)

    def lose(phase: str, client: int, answer: bytes | None) -> bytes | None:
        is_after = (client + seed) % 2  # half of them are lost before they are asked
        return None if client in fate.lost[phase] and bool(answer) == bool(is_after) else answer

    try:
        total, survivors = run_round(federation, lose)
    except TooFewClients:
        assert fate.cheats or any(fate.lost.values()), f"session {seed}: void without a reason"
        return "void"
    assert len(survivors) >= session.quorum
    assert np.array_equal(total.vector, expected_sum(session, survivors, vectors)), f"session {seed}: a wrong sum"
    assert set(total.blamed) <= fate.cheats, f"session {seed}: an honest client is blamed"
    return "sum"


def run_standing(seed: int, steps: int = 4) -> list[str]:
    """Run an epoch of standing keys and return 'sum' or 'void' for each step, or 'void' if it never began."""
    stream = Stream(digest("a random epoch", seed))
    size = 3 + stream.below(5)
    cohort = tuple(2 + 3 * rank for rank in range(size))
    quorum = 3 + stream.below(size - 2)
    bits, dimension = 1 + stream.below(32), 1 + stream.below(20)
    silos = Silos(make_epoch(cohort, quorum=quorum, bits=bits, dimension=dimension))

    def some() -> set[int]:
        count = stream.below(2 + size // 3) if stream.below(4) == 0 else 0
        return {cohort[rank] for rank in stream.subset(size, count)}

    lost_first, lost_second = some(), some()
    try:
        silos.set_up(lost_first, lost_second)
    except TooFewClients:
        assert lost_first or lost_second, f"epoch {seed}: void without a reason"
        return ["void"]
    outcomes, members = [], silos.current.members
    for number in range(steps):
        lost = some() & set(members)
        try:
            total = silos.step(number, 0, members, lost)
        except VoidStep as void:
            assert lost, f"epoch {seed}, step {number}: void without a reason"
            outcomes.append("void")
            if len(void.left) < quorum:
                break
            continue
        assert not lost, f"epoch {seed}, step {number}: a sum without all of its members"
        assert np.array_equal(total, silos.expected(number, 0, members)), (
            f"epoch {seed}, step {number}: a wrong sum"
        )
        outcomes.append("sum")
    return outcomes
