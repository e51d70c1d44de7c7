"""Opening a sum: add boxes, take the members' pads off, correct wrong answers, take off veils and A s."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import masks
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.field import PRIME, Elements
from d2pfed.secagg.lattice.messages import Opened
from d2pfed.secagg.lattice.parameters import SECRET_DEVIATION
from d2pfed.secagg.lattice.session import SEED_ELEMENTS, Request
from d2pfed.secagg.wire import ClientId

_SECRET_REACH = 8 * SECRET_DEVIATION  # a sum of n secrets is this times sqrt n at most, but for a chance below 2^-40


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MaskedTotal:
    """The sum of the survivors' masked vectors and what is needed to open it, by rank."""

    request: Request
    nonce: bytes
    keys: Mapping[int, bytes]
    boxes: Mapping[int, Elements] = field(repr=False)
    commitments: Mapping[int, bytes] = field(repr=False)
    total: RingVector = field(repr=False)

    @property
    def statement(self) -> bytes:
        """Return what members sign before they open it."""
        return sessions.opening_statement(self.request.session, self.request.context, self.nonce, self.keys)


class Opener:
    """What the members' answers say: a word for the summed secrets and one for each survivor's seed.

    A word has a value for each member that answered. Members found to lie are left out of all words.
    """

    def __init__(self, total: MaskedTotal, answers: Mapping[int, Opened], entropy: Entropy) -> None:
        session = total.request.session
        self._total, self._session = total, session
        self._ranks = sorted(total.keys)
        self.answered = sorted(answers)
        self._points = session.points[self.answered]
        present = sorted(total.request.keys)
        rows = [present.index(place) for place in self.answered]
        self._boxes = np.array([total.boxes[rank][rows] for rank in self._ranks])  # survivor, member, polynomial
        count = session.polynomials
        sums = np.array([answers[place].sums for place in self.answered])
        seeds = np.array([answers[place].seeds for place in self.answered])
        self._sums = (self._boxes[:, :, :count].sum(axis=0, dtype=np.int64) - sums) % PRIME
        self._seeds = (self._boxes[:, :, count].T.astype(np.int64) - seeds) % PRIME
        self._coefficients = fields.elements(entropy.stream(), count)
        self._left = np.ones(len(self.answered), np.bool_)  # members that are believed
        self._disputes: dict[int, NDArray[np.bool_]] = {}  # by survivor: members whose value does not fit its words
        self._undecoded: set[int] = set()  # survivors whose words do not decode

    def open(self) -> RingVector | None:
        """Return the sum, or None if it is not known yet who spoilt it."""
        size = self._session.committee.openers
        if self._syndromes(self._sums, size).any():
            wrong = fields.decode(self._points, self._sums @ self._coefficients % PRIME, size)
            if wrong is None:
                return None
            self._left &= ~wrong
        seeds = self._open_seeds()
        if seeds is None or self._syndromes(self._sums, size).any():
            return None
        return self._unmask(seeds)

    def open_traced(self, traces: Mapping[int, Elements]) -> RingVector:
        """Return the sum, opened by members that are in dispute with nobody; TooFewClients if too few are."""
        session = self._session
        present = np.array([place in traces for place in self.answered])
        self._left &= present
        coefficients = np.append(sessions.trace_coefficients(session, self._total.statement), (0, 1))
        silent = np.zeros(len(self._ranks), np.int64)
        combined = np.array([traces.get(place, silent) for place in self.answered])
        words = ((self._boxes @ coefficients).T - combined) % PRIME
        self._dispute(words, session.committee.openers)
        for wrong in self._disputes.values():
            self._left &= ~wrong
        seeds = self._open_seeds()
        openers = int(self._left.sum())
        if seeds is None or self._undecoded or openers < session.committee.openers:
            raise TooFewClients(
                f"{session.committee.openers} members in dispute with nobody must open a sum, got {openers}",
                blamed=self.blamed(),
            )
        if self._syndromes(self._sums, session.committee.openers).any():
            raise TooFewClients("members gave sums of pads that do not fit together", blamed=self.blamed())
        return self._unmask(seeds)

    def blamed(self) -> tuple[ClientId, ...]:
        """Return who must have cheated: in dispute with more of the other side than can be lying.

        With too few answers nobody is shown to cheat by a word that does not decode.
        """
        session, committee = self._session, self._session.committee
        against = np.zeros(len(self.answered), np.int64)
        clients = set[ClientId]()
        for survivor, wrong in self._disputes.items():
            against += wrong
            if int(wrong.sum()) > max(1, committee.colluders):
                clients.add(session.cohort[self._ranks[survivor]])
        if len(self.answered) >= committee.openers + 2 * committee.colluders:
            clients |= {session.cohort[self._ranks[survivor]] for survivor in self._undecoded}
        liars = np.flatnonzero(against > max(1, session.colluders))
        return tuple(sorted(clients | {session.members[self.answered[index]] for index in liars}))

    def _syndromes(self, words: Elements, size: int) -> Elements:
        """Return by how much words miss a polynomial of degree below `size`: zero for every column that fits."""
        known = np.flatnonzero(self._left)
        if len(known) <= size:
            return np.zeros((0, words.shape[1]), np.int64)
        matrix = fields.interpolation(self._points[known[:size]], self._points[known[size:]])
        return (fields.multiply(matrix, words[known[:size]]) - words[known[size:]]) % PRIME

    def _dispute(self, words: Elements, size: int) -> None:
        """Note, for each survivor whose word does not fit, with which members it is in dispute."""
        for survivor in np.flatnonzero(self._syndromes(words, size).any(axis=0)):
            known = np.flatnonzero(self._left)
            wrong = fields.decode(self._points[known], words[known, survivor], size)
            if wrong is None:
                self._undecoded.add(int(survivor))
                continue
            self._note(int(survivor), known[wrong])

    def _note(self, survivor: int, members: NDArray[np.int64]) -> None:
        self._disputes.setdefault(survivor, np.zeros(len(self._left), np.bool_))[members] = True

    def _open_seeds(self) -> list[bytes] | None:
        """Return the survivors' seeds, packed, by rank; None if one does not decode, or is not the committed one."""
        size = SEED_ELEMENTS + self._session.committee.threshold
        known = np.flatnonzero(self._left)
        if len(known) < size:
            return None
        at_seed = fields.interpolation(self._points[known[:size]], np.arange(1, SEED_ELEMENTS + 1))
        opened = fields.multiply(at_seed, self._seeds[known[:size]])
        for survivor in np.flatnonzero(self._syndromes(self._seeds, size).any(axis=0)):
            wrong = fields.decode(self._points[known], self._seeds[known, survivor], size)
            if wrong is None:
                return None
            self._note(int(survivor), known[wrong])
            right = known[~wrong][:size]
            matrix = fields.interpolation(self._points[right], np.arange(1, SEED_ELEMENTS + 1))
            opened[:, survivor] = fields.multiply(matrix, self._seeds[right, survivor, None])[:, 0]
        packed = [fields.pack(opened[:, survivor]) for survivor in range(len(self._ranks))]
        context, cohort = self._total.request.context, self._session.cohort
        for rank, seed in zip(self._ranks, packed, strict=True):
            if sessions.commitment(context, cohort[rank], seed) != self._total.commitments[rank]:
                return None
        return packed

    def _summed_secrets(self) -> IntVector:
        """Return the sum of the survivors' secrets, which must be short."""
        committee, session = self._session.committee, self._session
        known = np.flatnonzero(self._left)[: committee.openers]
        matrix = fields.interpolation(self._points[known], np.arange(1, committee.packed + 1))
        values = fields.multiply(matrix, self._sums[known]).T.reshape(-1)
        summed: IntVector = (values[: session.secret] + PRIME // 2) % PRIME - PRIME // 2
        most = isqrt(_SECRET_REACH * _SECRET_REACH * len(self._ranks))
        if values[session.secret :].any() or int(np.abs(summed).max()) > most:
            raise TooFewClients(f"a sum of secrets must be within {most}: somebody has spoilt it")
        return summed

    def _unmask(self, seeds: list[bytes]) -> RingVector:
        session, context = self._session, self._total.request.context
        total = self._total.total.copy()
        veils = [
            masks.veil(context, session.cohort[rank], seed) for rank, seed in zip(self._ranks, seeds, strict=True)
        ]
        session.ring.add_masks_into(total, [], veils)
        masks.add_product(session, context, total, -self._summed_secrets())
        return total
