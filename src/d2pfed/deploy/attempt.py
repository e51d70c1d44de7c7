"""A client in its runs and attempts: what it accepts, what it logs first, and what it remembers afterwards."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from d2pfed.accounting import Sampling
from d2pfed.deploy.account import ClientAccount
from d2pfed.deploy.config import ClientConfig
from d2pfed.deploy.layout import Layout
from d2pfed.deploy.requests import Progress, RunAnnouncement
from d2pfed.deploy.rosters import (
    Positions,
    accept_head,
    accept_roster,
    current_head,
    current_roster,
)
from d2pfed.deploy.state import AcceptedRuns, RunTerms, SavedPhase
from d2pfed.errors import PeerError, RolledBack
from d2pfed.ledger import decode_release
from d2pfed.ledger.client_log import ClientHistory, Entry
from d2pfed.ledger.files import software_digest
from d2pfed.ledger.rows import Head
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import Plan, Policy, Protocol, decode_plan
from d2pfed.plan.bounds import MOST_ATTEMPTS
from d2pfed.round import AttemptSession, accept_invitation, enrolled_in, invited_run
from d2pfed.round.session import read_invitation
from d2pfed.secagg import Client, Contribute, Enrolment, Position, Session, lattice
from d2pfed.secagg import History as Memory
from d2pfed.secagg.heads import SlotEnrolment
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.wire import MessageKind, kind_of

_log = logging.getLogger("d2pfed.deploy")

RESTARTS = 100  # of a server in one run: what it had begun before begins again
UNCHARGED_A_DAY = 1000  # attempts and epochs that came to nothing, over all runs
_DAY = 86_400


def accept_run(config: ClientConfig, announcement: RunAnnouncement) -> Progress | None:
    """Keep the terms of a run that this client's policy, roster and budget allow; no lock is held meanwhile.

    Return what this client has begun in the run; None for a greeting, which has no terms.
    """
    if announcement == announcement.greeting:
        return None
    plan, layout = decode_plan(announcement.plan), Layout.decode(announcement.layout)
    enrolment, history = enrolment_of(config, plan.protocol, announcement.roster, announcement.slip)
    config.policy.check(plan, enrolled_in(None if enrolment is None else enrolment.roster))
    if layout.dimension != plan.dimension:
        raise PeerError("a plan must have the dimension of its layout")
    ClientAccount.of(config).require_room(plan, announcement.run, history)
    terms = RunTerms(
        announcement.plan,
        announcement.layout,
        announcement.first_draw,
        b"" if enrolment is None else enrolment.roster.digest,
        verdict_of(config.policy),
        config.app,
    )
    active = (Entry.BEGUN, Entry.CHARGE)  # a client that speaks once begins nothing
    begun = {str(row.body["run"]): place for place, row in enumerate(history.rows) if row.entry in active}
    AcceptedRuns(config.directory).accept(announcement.run, terms, begun)
    return progress_of(history, announcement.run, plan)


def progress_of(history: ClientHistory, run: str, plan: Plan) -> Progress:
    """Return the attempts of a run that this client would refuse as stale; those before them do not matter.

    An epoch begins before its first attempt is charged, so its row says nothing of attempts.
    """
    begun = [body for body in history.bodies(Entry.BEGUN) if body["run"] == run]
    places = [(int(str(body["round"])), int(str(body["attempt"]))) for body in begun if "epoch" not in body]
    releases = (
        decode_release(str(body["release"])) for body in history.bodies(Entry.CHARGE) if body["run"] == run
    )
    places += [(release.round, release.attempt) for release in releases]
    steps = sum(1 << step for step in {number * plan.attempts_per_round + tried for number, tried in places})
    return Progress(steps, max((int(str(body["epoch"])) + 1 for body in begun if "epoch" in body), default=0))


@dataclass(frozen=True, slots=True)
class ClientAttempt:
    """One client's half of one attempt, between two requests."""

    config: ClientConfig
    enrolment: Enrolment | SlotEnrolment | None
    history: ClientHistory
    terms: RunTerms
    plan: Plan
    session: AttemptSession
    saved: SavedPhase

    @staticmethod
    def begin(config: ClientConfig, invitation: bytes, seconds: float) -> "ClientAttempt":
        """Check an invitation, and note that its attempt has begun: durably, before anything of it leaves.

        Guarantee: no attempt begins twice, so its keys and noise are used for one session; adverts of one life show
        positions that strictly rise. Checked: test_flower_client.py::test_an_invitation_is_answered_once.
        """
        now = time.time()
        attempt = ClientAttempt.resume(config, SavedPhase("", invitation, now, now + seconds, b""))
        session, plan = attempt.session, attempt.plan
        if isinstance(session, lattice.Session) and name_of(config, attempt.enrolment) not in session.members:
            raise PeerError(f"client {config.client} is not in the committee that it has computed")
        ClientAccount.of(config).require_below_cap(plan, session.run, attempt.history)

        def require(history: ClientHistory) -> None:
            rows = [row for row in history.bodies(Entry.BEGUN) if row["run"] == session.run]
            last = max(((int(str(row["round"])), int(str(row["attempt"]))) for row in rows), default=(-1, -1))
            if (session.round, session.attempt) <= last:  # stale, or repeated
                raise PeerError(
                    f"round {session.round + 1}, attempt {session.attempt} of run {session.run} is stale: "
                    f"round {last[0] + 1}, attempt {last[1]} has begun here"
                )
            require_beginnings_left(history, session.run, plan)
            attempt.require_unused_draw(history)

        history = note_begun(config, attempt.history, require, attempt.row)
        return replace(attempt, history=history, saved=replace(attempt.saved, run=session.run))

    @staticmethod
    def resume(config: ClientConfig, saved: SavedPhase) -> "ClientAttempt":
        """Go on with what was kept, as the invitation has it."""
        run = AcceptedRuns(config.directory).terms(invited_run(saved.invitation))
        enrolment, history = enrolment_of(config, decode_plan(run.plan).protocol)
        roster = None if enrolment is None else enrolment.roster
        invited = read_invitation(saved.invitation, roster)
        protocols = Protocol.PAIRWISE, Protocol.LATTICE
        terms, plan = agreed_plan(config, enrolment, invited.run, invited.client, *protocols)
        least = config.policy.least_cohort
        session = accept_invitation(plan, saved.invitation, least, roster, terms.first_draw)
        return ClientAttempt(config, enrolment, history, terms, plan, session, saved)

    @property
    def row(self) -> dict[str, object]:
        """What a row says of this attempt."""
        session = self.session
        return {
            "run": session.run,
            "round": session.round,
            "attempt": session.attempt,
            "session": session.digest.hex(),
            "roster": session.roster_digest.hex(),
            "draw": session.draw,
            "block": session.block,
        }

    def charge(self) -> int:
        """Write the row of this attempt's vector, durably, and return how many of the run were sent before.

        A client that speaks once has no phase that is used up, so its rows say whether it has spoken. At its cap it
        writes one, too: its position must move on.
        """
        session, row = self.session, self.row
        sent = ClientAccount.of(self.config).charge(
            self.plan,
            session.run,
            session.round,
            session.attempt,
            {name: row[name] for name in ("session", "roster", "draw")},
            require=self._require_chargeable,
        )
        if isinstance(session, lattice.Session) and sent >= self.plan.max_participations:
            note_begun(self.config, self.config.log.read(), self._require_silent, {**row, "silent": True})
        return sent

    def _require_silent(self, history: ClientHistory) -> None:
        self._require_chargeable(history)
        require_beginnings_left(history, self.session.run, self.plan)

    def _require_chargeable(self, history: ClientHistory) -> None:
        is_once, session = self.plan.sampling.method is Sampling.ONCE, self.session
        if isinstance(session, lattice.Session):
            require_unsent(history, session)
            self.require_unused_draw(history)
        elif is_once:  # two runs may have begun on one draw before either got a vector, so it is looked at again
            self.require_unused_draw(history)

    def require_unused_draw(self, history: ClientHistory) -> None:
        """Refuse a draw that was used before under this roster, in any run; under `once`, one that got a vector.

        That an attempt has begun does not keep a member of its committee from its own vector.
        """
        if self.enrolment is None or self.enrolment.roster.depth is None:
            return
        is_once, session, own = self.plan.sampling.method is Sampling.ONCE, self.session, self.row
        begun = () if is_once else history.bodies(Entry.BEGUN)
        rows = [*history.bodies(Entry.CHARGE), *(row for row in begun if row["session"] != own["session"])]
        if session.draw in [row["draw"] for row in rows if row["roster"] == own["roster"]]:
            raise PeerError(f"draw {session.draw} of this roster was used before")

    def memory(self) -> Memory | None:
        """Return this client's signed position and what it remembers, where it is enrolled."""
        if self.enrolment is None:
            return None
        colluders = self.config.policy.colluders(self.plan, enrolled_in(self.enrolment.roster))
        return memory_of(self.config, self.enrolment, self.history, colluders)

    def position(self) -> Position | None:
        """Return where this client's log stands now, signed, where it is enrolled."""
        if self.enrolment is None:
            return None
        return memory_of(self.config, self.enrolment, self.config.log.read()).position

    def answer(self, request: bytes, contribute: Contribute) -> tuple[bytes, bytes | None]:
        """Return the answer to a request, and the state to be kept for the next one, if there is one."""
        config, memory = self.config, self.memory()
        if not isinstance(self.session, Session) or isinstance(self.enrolment, SlotEnrolment):
            raise PeerError("this attempt uses the lattice protocol, got a request of another protocol")
        if self.saved.state:
            state = self.saved.state
            client = Client.restore(self.session, config.client, contribute, state, self.enrolment, memory)
        else:
            entropy = Entropy.system().require_system()
            client = Client(self.session, config.client, contribute, entropy, self.enrolment, memory)
        with marking_rollbacks(config):
            answer = client.receive(request)
        if self.enrolment is not None and client.met:
            peers_of(config, self.enrolment).keep(client.met)
        return answer, None if kind_of(answer) == MessageKind.UNMASKING_SHARES else client.save()


def agreed_plan(
    config: ClientConfig, enrolment: Enrolment | SlotEnrolment | None, run: str, invited: int, *protocols: Protocol
) -> tuple[RunTerms, Plan]:
    """Return the terms and the plan of a run, if this client is the one invited and its policy allows it still.

    `protocols` are those that the request may belong to; the plan says which.
    """
    if invited != name_of(config, enrolment):
        raise PeerError(f"this is client {config.client}, the invitation is for client {invited}")
    roster = None if enrolment is None else enrolment.roster
    terms = AcceptedRuns(config.directory).terms(run)
    if terms.roster != (b"" if roster is None else roster.digest):  # population and draws may be others
        raise PeerError(f"run {run} was announced under another roster: it must be announced again")
    if terms.app != config.app:  # the server must not choose whose account a vector is charged to
        raise PeerError(f"run {run} was announced to an app other than {config.app or 'this one'}")
    plan = decode_plan(terms.plan)
    if terms.allowed != verdict_of(config.policy):
        config.policy.check(plan, enrolled_in(roster))  # its owner has changed it since, or the software
    protocol = plan.protocol if plan.protocol in protocols else protocols[0]
    if (plan.protocol is Protocol.LATTICE) != (protocol is Protocol.LATTICE):  # its quorum suffices nowhere else
        raise PeerError(
            f"run {run} was accepted with the {plan.protocol} protocol, got a request of another protocol"
        )
    config.policy.require_served(protocol, plan, enrolled_in(roster))
    return terms, plan


def require_unsent(history: ClientHistory, session: lattice.Session) -> None:
    """Refuse a second vector of an attempt, and one of an attempt before the last: each has a row."""
    releases = (decode_release(str(body["release"])) for body in history.bodies(Entry.CHARGE))
    sent = [(release.round, release.attempt) for release in releases if release.run == session.run]
    silent = [row for row in history.bodies(Entry.BEGUN) if row["run"] == session.run and row.get("silent")]
    last = max([*sent, *((int(str(row["round"])), int(str(row["attempt"]))) for row in silent)], default=(-1, -1))
    if (session.round, session.attempt) <= last:
        raise PeerError(
            f"round {session.round + 1}, attempt {session.attempt} of run {session.run} is stale: this client has sent "
            f"its vector of round {last[0] + 1}, attempt {last[1]}"
        )


def note_begun(
    config: ClientConfig,
    history: ClientHistory,
    require: Callable[[ClientHistory], None],
    row: Mapping[str, object],
) -> ClientHistory:
    """Note durably that something has begun, if the very log that the row is added to allows it."""
    while True:
        require(history)
        after = config.log.append(history, Entry.BEGUN, row)
        if after is not None:
            return after
        history = config.log.read()


def name_of(config: ClientConfig, enrolment: Enrolment | SlotEnrolment | None) -> int:
    """Return what sessions call this client: its identity, or its slot where it holds the head of a roster."""
    return config.client if enrolment is None else enrolment.roster.name(config.client)


def peers_of(config: ClientConfig, enrolment: Enrolment | SlotEnrolment) -> Positions:
    """Return where this client has met others."""
    keys = enrolment.roster.keys if isinstance(enrolment, Enrolment) else None
    return Positions(config.directory / "peers", keys)


def memory_of(
    config: ClientConfig, enrolment: Enrolment | SlotEnrolment, history: ClientHistory, colluders: int = 0
) -> Memory:
    """Return this client's signed position and what it remembers of its peers."""
    roster, head = enrolment.roster, history.head
    return Memory(
        sign_position(enrolment.secret, roster.authority, config.client, head.seq, head.hash),
        lambda count, found: history.holds(Head(count, found)),
        peers_of(config, enrolment).latest(),
        colluders,
    )


@contextmanager
def marking_rollbacks(config: ClientConfig) -> Iterator[None]:
    """Refuse everything from now on if somebody has met this client where its log has never been."""
    try:
        yield
    except RolledBack as found:
        config.log.mark("shown by the server or another client", Head(found.count, found.head))
        _log.error("%s: `d2pfed client adopt` is needed", found)
        raise PeerError(
            "this client was rolled back or cloned, and refuses everything until a person runs `d2pfed client adopt`"
        ) from None


def verdict_of(policy: Policy) -> bytes:
    """Return what a plan was allowed by: the policy, and the software that has held the plan against it."""
    return digest("d2pfed allowed", software_digest(), canonical.encode(policy))


def require_beginnings_left(history: ClientHistory, run: str, plan: Plan) -> None:
    """Refuse to begin more often than a run of this plan needs: each time leaves a permanent row in this client's log.

    A run begins as often as it has attempts, at most; with standing keys, once and after void attempts. Names of runs
    cost nothing, so failed attempts are bounded over all runs, by the day. Sessions are counted: a member at its
    cap has two rows of one, its key's and its silent vector's.
    """
    most = min(plan.attempts_per_round * plan.max_attempts, MOST_ATTEMPTS) + RESTARTS
    begun = len({body["session"] for body in history.bodies(Entry.BEGUN) if body["run"] == run})
    if begun >= most:
        raise PeerError(f"run {run} has begun {begun} attempts here, its plan allows at most {most}")
    since = time.time() - _DAY
    begun, charged = (
        len({body["session"] for body in history.bodies(entry) if int(str(body["time"])) > since})
        for entry in (Entry.BEGUN, Entry.CHARGE)
    )
    if begun - charged >= UNCHARGED_A_DAY:
        raise PeerError(f"{begun - charged} attempts failed here within a day, at most {UNCHARGED_A_DAY} may")


def enrolment_of(
    config: ClientConfig, protocol: Protocol | None, brought: bytes = b"", slip: bytes = b""
) -> tuple[Enrolment | SlotEnrolment | None, ClientHistory]:
    """Return under which roster this client stands, and its log; without a key it has no roster.

    In the lattice protocol it goes by the head and its slip alone, in the others by the whole roster.
    """
    if config.secret is None:
        return None, config.log.read()
    if protocol is Protocol.LATTICE:
        return accept_head(config, brought, slip) if brought else current_head(config)
    return accept_roster(config, brought) if brought else current_roster(config)
