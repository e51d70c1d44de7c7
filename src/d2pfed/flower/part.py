"""A client's part in runs and attempts: what it agrees to, what its log says first, and what it remembers after."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from d2pfed.accounting import Sampling
from d2pfed.errors import PeerError, RolledBack
from d2pfed.flower.account import Account
from d2pfed.flower.envelope import Introduction
from d2pfed.flower.home import Home
from d2pfed.flower.layout import Layout
from d2pfed.flower.positions import Positions
from d2pfed.flower.rosters import accept_roster, current_roster
from d2pfed.flower.runs import Runs, Told
from d2pfed.flower.states import Saved
from d2pfed.ledger.client_history import ClientHistory, Entry
from d2pfed.ledger.rows import Head
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import Plan, decode_plan
from d2pfed.round import enrolled_in, invited_session
from d2pfed.secagg import Client, Contribute, Enrolment, Session, decode_invitation
from d2pfed.secagg import History as Memory
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.position import sign_position
from d2pfed.secagg.wire import kind_of

_log = logging.getLogger("d2pfed.flower")


def agree(home: Home, introduction: Introduction) -> None:
    """Keep a run that this client's policy, roster and budget allow; all work is done outside of any lock."""
    plan, layout = decode_plan(introduction.plan), Layout.decode(introduction.layout)
    enrolment, history = _standing(home, introduction.roster)
    home.policy.check(plan, enrolled_in(None if enrolment is None else enrolment.roster))
    require_same_dimension(plan, layout)
    Account(home.log, home.budget).require_room(plan, introduction.run, history)
    roster = b"" if enrolment is None else enrolment.roster.digest
    allowed = digest("d2pfed allowed", canonical.encode(home.policy))
    told = Told(introduction.plan, introduction.layout, introduction.first_draw, roster, allowed)
    Runs(home.path).agree(introduction.run, told)


@dataclass(frozen=True, slots=True)
class Part:
    """One client in one attempt, between two requests."""

    home: Home
    enrolment: Enrolment | None
    history: ClientHistory
    told: Told
    plan: Plan
    session: Session
    saved: Saved

    @staticmethod
    def begin(home: Home, invitation: bytes, seconds: float) -> "Part":
        """Check an invitation, and note that its attempt has begun: durably, before anything of it leaves.

        Guarantee: no attempt begins twice, so its keys and noise are used for one session; adverts of one life show
        positions that strictly rise. Checked: test_flower_client.py::test_an_invitation_is_answered_once.
        """
        now = time.time()
        part = Part.resume(home, Saved("", invitation, now, now + seconds, b""))
        Account(home.log, home.budget).require_turn(part.plan, part.session.run, part.history)
        history = part.history
        while True:
            require_later(history, part.session)
            if part.is_drawn:
                require_unused_draw(history, part.session, part.plan)
            after = home.log.append(history, Entry.BEGUN, _begun(part.session))
            if after is not None:
                return replace(part, history=after, saved=replace(part.saved, run=part.session.run))
            history = home.log.read()

    @property
    def is_drawn(self) -> bool:
        """Say whether the cohort follows from a verified draw."""
        return self.enrolment is not None and self.enrolment.roster.depth is not None

    def require_draw_left(self, history: ClientHistory) -> None:
        """Refuse a second vector on the draw of a partition: two runs may have begun on it before either got one."""
        if self.is_drawn and self.plan.sampling.method is Sampling.ONCE:
            require_unused_draw(history, self.session, self.plan)

    @staticmethod
    def resume(home: Home, saved: Saved) -> "Part":
        """Go on with what was kept, as the invitation has it."""
        enrolment, history = _standing(home)
        roster = None if enrolment is None else enrolment.roster
        invited = decode_invitation(saved.invitation, None if roster is None else roster.depth)
        if invited.client != home.client:
            raise PeerError(f"this is client {home.client}, the invitation is for client {invited.client}")
        told = Runs(home.path).told(invited.run)
        require_same_roster(invited.run, told, b"" if roster is None else roster.digest)
        plan = decode_plan(told.plan)
        if told.allowed != digest("d2pfed allowed", canonical.encode(home.policy)):
            home.policy.check(plan, enrolled_in(roster))  # its owner has changed it since
        least = home.policy.least_cohort
        session = invited_session(plan, saved.invitation, least, roster, told.first_draw)
        return Part(home, enrolment, history, told, plan, session, saved)

    def answer(self, request: bytes, contribute: Contribute) -> tuple[bytes, bytes | None]:
        """Return the answer to a request, and the state to be kept for the next one, if there is one."""
        client = self._client(contribute)
        try:
            answer = client.receive(request)
        except RolledBack as found:
            self._mark(found)
        if self.enrolment is not None and client.met:
            Positions(self.home.path / "peers", self.enrolment.roster.keys).keep(client.met)
        return answer, None if kind_of(answer) == MessageKind.UNMASKING_SHARES else client.save()

    def _client(self, contribute: Contribute) -> Client:
        who, memory = self.home.client, self._memory()
        if not self.saved.state:
            entropy = Entropy.system().require_system()
            return Client(self.session, who, contribute, entropy, self.enrolment, memory)
        return Client.restore(self.session, who, contribute, self.saved.state, self.enrolment, memory)

    def _memory(self) -> Memory | None:
        if self.enrolment is None:
            return None
        roster, head = self.enrolment.roster, self.history.head
        return Memory(
            sign_position(self.enrolment.secret, roster.authority, self.home.client, head.seq, head.hash),
            lambda count, hash_: self.history.holds(Head(count, hash_)),
            Positions(self.home.path / "peers", roster.keys).latest(),
            self.home.policy.colluders(self.plan, enrolled_in(roster)),
        )

    def _mark(self, found: RolledBack) -> NoReturn:
        self.home.log.mark("shown by the server or another client", Head(found.count, found.head))
        _log.error("%s: `d2pfed client adopt` is needed", found)
        raise PeerError("this client was rolled back or cloned, and takes no part until a person has seen to it")


def require_same_dimension(plan: Plan, layout: Layout) -> None:
    """Refuse a plan for another number of parameters than the layout has."""
    if layout.dimension != plan.codec.rotation.dimension:
        raise PeerError("a plan must be for the parameters of its layout")


def require_same_roster(run: str, told: Told, digest_now: bytes) -> None:
    """Refuse to go on with a run that was allowed under another roster: population and draws may be others."""
    if told.roster != digest_now:
        raise PeerError(f"run {run} was introduced under another roster: it must be introduced again")


def require_later(history: ClientHistory, session: Session) -> None:
    """Refuse an attempt that is not later than all that this client has begun in its run: stale, or repeated."""
    begun = [_numbers(body) for body in history.bodies(Entry.BEGUN) if body["run"] == session.run]
    last = max(begun, default=(-1, -1))
    if (session.round, session.attempt) <= last:
        raise PeerError(
            f"round {session.round}, attempt {session.attempt} of run {session.run} is stale: "
            f"round {last[0]}, attempt {last[1]} has begun here"
        )


def require_unused_draw(history: ClientHistory, session: Session, plan: Plan) -> None:
    """Refuse a draw that was used before under this roster, in any run; under `once`, one that got a vector."""
    entry = Entry.CHARGE if plan.sampling.method is Sampling.ONCE else Entry.BEGUN
    used = [body["draw"] for body in history.bodies(entry) if body["roster"] == session.roster_digest.hex()]
    if session.draw in used:
        raise PeerError(f"draw {session.draw} of this roster was used before")


def _begun(session: Session) -> Mapping[str, object]:
    return {
        "run": session.run,
        "round": session.round,
        "attempt": session.attempt,
        "session": session.digest.hex(),
        "roster": session.roster_digest.hex(),
        "draw": session.draw,
        "block": session.block,
    }


def _numbers(body: Mapping[str, object]) -> tuple[int, int]:
    return int(str(body["round"])), int(str(body["attempt"]))


def _standing(home: Home, brought: bytes = b"") -> tuple[Enrolment | None, ClientHistory]:
    """Return under which roster this client stands, and its log; without a key it has no roster."""
    if home.secret is None:
        return None, home.log.read()
    return accept_roster(home, brought) if brought else current_roster(home)
