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

Boxes = NDArray[np.uint16]  # elements of the field, in as few bytes: a whole cohort's are kept

# The numbers of n secrets' sum are this times sqrt n at most, except with a chance below 2^-39 (up to 1,024 numbers).
_SECRET_REACH = 8 * SECRET_DEVIATION


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MaskedTotal:
    """The sum of the survivors' masked vectors and what is needed to open it, by rank."""

    request: Request
    identities: tuple[ClientId, ...]  # of the cohort
    nonce: bytes
    keys: Mapping[int, bytes]
    boxes: Mapping[int, Boxes] = field(repr=False)
    commitments: Mapping[int, bytes] = field(repr=False)
    total: RingVector = field(repr=False)
    statement: bytes = field(init=False)  # what members sign before they open it

    def __post_init__(self) -> None:
        request = self.request
        statement = sessions.opening_statement(request.session, request.context, self.nonce, self.keys)
        object.__setattr__(self, "statement", statement)

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return tuple(self.identities[rank] for rank in sorted(self.keys))


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
        boxes = np.stack([total.boxes[rank] for rank in self._ranks])  # survivor, member, polynomial
        self._boxes = boxes if len(rows) == len(present) else boxes[:, rows]
        count = session.polynomials
        sums = np.array([answers[place].sums for place in self.answered])
        seeds = np.array([answers[place].seeds for place in self.answered])
        self._sums = (self._boxes.sum(axis=0, dtype=np.uint32)[:, :count].astype(np.int64) - sums) % PRIME
        self._seeds = (self._boxes[:, :, count].T.astype(np.int64) - seeds) % PRIME
        self._coefficients = fields.elements(entropy.stream(), count)
        self._left = np.ones(len(self.answered), np.bool_)  # members that are believed
        self._forget()

    def open(self) -> RingVector | None:
        """Return the sum, or None if it is not known yet who spoilt it."""
        if not self._leave_out_liars():
            return None
        seeds = self._open_seeds()
        return None if seeds is None else self._unmask(seeds)

    def open_traced(self, traces: Mapping[int, Elements]) -> RingVector:
        """Return the sum, opened by members that are in dispute with nobody; TooFewClients if too few are."""
        session, size = self._session, self._session.committee.openers
        self._left = np.array([place in traces for place in self.answered])
        self._forget()
        coefficients = np.append(sessions.trace_coefficients(session, self._total.statement), (0, 1))
        silent = np.zeros(len(self._ranks), np.int64)
        combined = np.array([traces.get(place, silent) for place in self.answered])
        words = ((self._boxes @ coefficients).T - combined) % PRIME
        if int(self._left.sum()) >= size:
            wrong = self._judge(words, size)
            self._suspect(wrong, size)
            self._left &= ~wrong.any(axis=1)
        openers = int(self._left.sum())
        if self._failed or openers < size:
            raise self._void(f"{size} members in dispute with nobody must open a sum, got {openers}")
        if not self._leave_out_liars():
            raise self._void("members gave sums of pads that do not fit together")
        seeds = self._open_seeds()
        if seeds is None:
            raise self._void("a seed is not the one that its client has committed itself to")
        return self._unmask(seeds)

    def blamed(self) -> tuple[ClientId, ...]:
        """Return who must have cheated: in dispute with more of the other side than can be lying.

        A word counts for this only if enough members answered that the colluders among them cannot change what it
        decodes to: otherwise they could frame honest clients and members.
        """
        session = self._session
        clients = (self._disputes.sum(axis=0) > max(1, session.committee.colluders)) | self._shown_false
        members = self._disputes.sum(axis=1) > max(1, session.colluders)
        ranks, places = np.flatnonzero(clients), np.flatnonzero(members)
        found = set[ClientId]()  # of more than can collude some are honest: then nobody is named
        if len(ranks) <= max(1, session.colluders):
            found |= {self._total.identities[self._ranks[survivor]] for survivor in ranks}
        if len(places) <= max(1, session.committee.colluders):
            members = (session.members[self.answered[index]] for index in places)
            found |= {self._total.identities[session.rank(member)] for member in members}
        return tuple(sorted(found))

    def _void(self, text: str) -> TooFewClients:
        """Return the error that ends the attempt: with those to blame, and those whom the next one leaves out.

        More clients than can collude do not fail unless members lie: then none is left out for it.
        """
        blamed, found = self.blamed(), sorted(self._failed | self._suspects)
        suspects = [self._total.identities[self._ranks[each]] for each in found]
        if suspects:
            listed = ", ".join(map(str, suspects[:8]))
            text += f"; client {listed}, or more than {self._correctable} members, gave false shares"
        is_possible = len(suspects) <= max(1, self._session.colluders)
        return TooFewClients(text, blamed=blamed, suspected=tuple(sorted(suspects)) if is_possible else ())

    def _suspect(self, wrong: NDArray[np.bool_], size: int) -> None:
        """Note the survivors, those with most disputes first, without whom enough members would be in no dispute.

        Either they or as many members have lied, and nobody can tell which.
        """
        wrong = wrong & self._left[:, None]
        while int((self._left & ~wrong.any(axis=1)).sum()) < size:
            worst = int(wrong.sum(axis=0).argmax())
            self._suspects.add(worst)
            wrong[:, worst] = False

    def _forget(self) -> None:
        shape = len(self.answered), len(self._ranks)
        self._disputes = np.zeros(shape, np.bool_)  # by member and survivor: one of the two must have lied
        self._failed = set[int]()  # survivors whose words do not decode, or decode to another seed
        self._suspects = set[int]()  # survivors that have cheated, unless members have
        self._shown_false = np.zeros(len(self._ranks), np.bool_)  # those of them that must have cheated
        self._correctable = 0

    def _fits(self, words: Elements, size: int) -> bool:
        """Say whether all words, by columns, are polynomials of degree below `size` at the members left."""
        left = np.flatnonzero(self._left)
        return not fields.misfits(self._points[left], words[left], np.arange(size)).any()

    def _leave_out_liars(self) -> bool:
        """Leave out members whose sums are wrong, and say whether those of the others fit together.

        One combination of all columns is decoded. Its coefficients are the server's secret: who knew them could lie
        unseen.
        """
        size, left = self._session.committee.openers, np.flatnonzero(self._left)
        if self._fits(self._sums, size):
            return True
        wrong = fields.decode(self._points[left], self._sums[left] @ self._coefficients % PRIME, size)
        if wrong is None:
            return False
        self._left[left[wrong]] = False
        return self._fits(self._sums, size)

    def _judge(self, words: Elements, size: int) -> NDArray[np.bool_]:
        """Decode a word of each survivor at the members left; return which values are wrong, and note the disputes."""
        left = np.flatnonzero(self._left)
        patience = max(1, self._session.colluders)
        found, lost = fields.decode_words(self._points[left], words[left], size, patience)
        self._correctable = (len(left) - size) // 2
        wrong = np.zeros_like(self._disputes)
        wrong[left] = found
        if self._correctable >= self._session.committee.colluders:
            self._disputes |= wrong
        self._fail(lost)
        return wrong

    def _fail(self, survivors: list[int]) -> None:
        self._failed |= set(survivors)
        if self._correctable >= self._session.committee.colluders:
            self._shown_false[survivors] = True

    def _open_seeds(self) -> list[bytes] | None:
        """Return the survivors' seeds, packed, by rank; None if one does not decode, or is not the committed one."""
        size = SEED_ELEMENTS + self._session.committee.threshold
        wrong = self._judge(self._seeds, size)
        context, cohort, wanted = (
            self._total.request.context,
            self._session.cohort,
            np.arange(1, SEED_ELEMENTS + 1),
        )
        left = np.flatnonzero(self._left)[:size]
        opened = fields.multiply(fields.interpolation(self._points[left], wanted), self._seeds[left])
        for survivor in np.flatnonzero(wrong[left].any(axis=0)):
            right = np.flatnonzero(self._left & ~wrong[:, survivor])[:size]
            matrix = fields.interpolation(self._points[right], wanted)
            opened[:, survivor] = fields.multiply(matrix, self._seeds[right, survivor, None])[:, 0]
        packed = [fields.pack(seed) for seed in opened.T]
        for index, rank in enumerate(self._ranks):
            if sessions.commitment(context, cohort[rank], packed[index]) != self._total.commitments[rank]:
                self._fail([index])
        return None if self._failed else packed

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
