"""A server that trains, its clients, and what the world outside has seen of them: for kills and failing disks.

Nothing here imports torch, so a fork of one warm process is ready at once. Each scenario has a `live` that works in a
directory until it is done, going on with what an earlier life has left, and a `wrong` that counts what must never be.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from d2pfed.accounting import SERVER
from d2pfed.deploy.config import read_client_config, read_secret
from d2pfed.deploy.rosters import SignedRoster
from d2pfed.errors import D2PFedError
from d2pfed.ledger import RowKind, read_rows, verify
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.randomness import digest
from d2pfed.plan import Plan, PrivacyTarget, calibrate, guarantees
from d2pfed.round import Attempt, session_of
from d2pfed.runs import ArrayShape, RunSettings, open_run
from d2pfed.secagg import Session, Sum, decode_roster
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.training import ServerOptimizer
from support.enrolled_clients import directory_of, enrol, make_plan
from support.malicious_server import MaliciousServer

ROUNDS = 3
PLAN = calibrate(
    PrivacyTarget(
        dimension=4,
        population=6,
        cohort_size=6,
        rounds=ROUNDS,
        epsilon=50.0,
        delta=1e-3,
        against=SERVER,
        sampling="none",
        spare=200,
        attempts_per_round=200,
    )
)
EPSILON = min(each.epsilon for each in guarantees(PLAN) if each.observer == PLAN.against)
SETTINGS = RunSettings(
    title="a run",
    data="none",
    target=None,
    rounds=ROUNDS,
    optimizer=ServerOptimizer(),
    arrays=(ArrayShape("weights", (4,)),),
)


class OutsideError(Exception):
    """The world outside could not be told: an error of the scenario and not of what is tried."""


class Outside:
    """What has left, written down for good before anything else happens; `watcher` gets a byte for each."""

    def __init__(self, directory: Path, watcher: int | None = None) -> None:
        self._file, self._watcher = directory / "outside", watcher

    def tell(self, *words: object) -> None:
        """Write down that something has left."""
        try:
            with self._file.open("a") as outside:
                outside.write(" ".join(map(str, words)) + "\n")
                outside.flush()
                os.fsync(outside.fileno())
        except OSError as error:
            raise OutsideError from error
        if self._watcher is not None:
            os.write(self._watcher, b".")

    def keep(self, name: str, content: bytes) -> None:
        """Keep something that was sent under a name, for good or not at all."""
        try:
            (self._file.parent / name).write_bytes(content)
        except OSError as error:
            raise OutsideError from error

    def told(self, what: str) -> list[tuple[str, ...]]:
        """Return what has left of a kind; a line that was torn has not."""
        lines = self._file.read_text().split("\n")[:-1] if self._file.exists() else []
        return [tuple(words) for kind, *words in map(str.split, lines) if kind == what]


@dataclass(frozen=True)
class Masked:
    """A sum that tells when it is opened."""

    outside: Outside
    session: Session

    @property
    def survivors(self) -> tuple[int, ...]:
        return self.session.cohort

    def unmask(self) -> Sum:
        self.outside.tell("release", self.session.round, self.session.attempt)
        return Sum(np.zeros(PLAN.codec.length, np.uint32), ())


@dataclass(frozen=True)
class Crowd:
    """Clients that are asked for vectors and always answer."""

    plan: Plan
    outside: Outside

    def draw(self, _attempt: Attempt) -> tuple[int, ...]:
        return tuple(range(self.plan.cohort_size))

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        return session_of(self.plan, attempt, cohort)

    def collect(self, session: Session, _model: np.ndarray, _taken: Mapping[int, int]) -> Masked:
        self.outside.tell("asked", session.round, session.attempt)
        return Masked(self.outside, session)

    def exchanges(self) -> tuple[()]:
        return ()


class Nothing:
    """Measures nothing."""

    def validate(self, rounds: int, params: np.ndarray) -> dict[str, float]:
        return {"rounds": float(rounds)}

    def test(self, params: np.ndarray) -> dict[str, float]:
        return {"size": float(len(params))}


def serve(directory: Path, watcher: int | None = None) -> None:
    """Train a run to its end, or go on with it."""
    outside = Outside(directory, watcher)
    with (
        patch("d2pfed.runs.report.write_report"),
        patch("d2pfed.runs.report.read_report"),
        open_run(directory / "run", SETTINGS, PLAN, np.zeros(4, np.float32)) as run,
    ):
        outside.tell("opened")
        run.train(Crowd(PLAN, outside), Nothing(), lambda _: True)


def wrong_server(directory: Path) -> int:
    """Count what the ledger does not know of what has left, attempts that were opened twice, and epsilon not stated."""
    outside, ledger = Outside(directory), directory / "run" / "ledger.sqlite"
    asked, opened = outside.told("asked"), outside.told("release")
    found = len(asked) - len(set(asked)) + len(opened) - len(set(opened))
    if not asked:
        return found
    if not ledger.exists():
        return found + len(asked)
    rows = read_rows(ledger)

    def keys(kind: RowKind) -> set[tuple[str, ...]]:
        return {(str(row.key.round), str(row.key.attempt)) for row in rows if row.key and row.kind is kind}

    report = verify(ledger)
    found += len(set(asked) - keys(RowKind.RESERVE)) + len(set(opened) - keys(RowKind.COMMIT))
    return found + (report.spent < EPSILON * (1 - 1e-9)) + (report.charged.get("run", 0) < len(set(opened)))


CLIENTS = 3
CLIENT_PLAN = make_plan(CLIENTS, rounds=ROUNDS, dropouts=0.0, spare=97, attempts_per_round=100)


def enrolled(directory: Path) -> None:
    """Make clients in directories of their own."""
    (directory / "roster").write_bytes(enrol(directory, CLIENTS, None, budget=1e9).data)


def server_of(directory: Path) -> MaliciousServer:
    """Return the server of these clients."""
    data, authority = (directory / "roster").read_bytes(), read_secret(directory / "authority.key")
    return MaliciousServer(
        directory, CLIENT_PLAN, SignedRoster(decode_roster(data, signing_public(authority)), data)
    )


def participate(directory: Path, watcher: int | None = None, attempts: int = ROUNDS) -> None:
    """Let clients take part in attempts, each with the next number, and write down every vector that has left."""
    outside = Outside(directory, watcher)
    server = server_of(directory)
    server.announce()
    begun = len(outside.told("attempt"))
    kept = server.ask_frame

    def ask(client: int, frame: bytes) -> bytes:
        if kind_of(frame) == MessageKind.MASK_REQUEST:
            name = digest("request", frame).hex()
            outside.keep(name, frame)
            outside.tell("request", client, name)
        answer = kept(client, frame)
        if kind_of(answer) == MessageKind.MASKED_VECTOR:
            outside.tell("vector", client, digest("request", frame).hex(), digest("vector", answer).hex())
        else:
            outside.tell("answer", client)
        return answer

    with patch.object(server, "ask_frame", ask):
        for attempt in range(begun, begun + attempts):
            outside.tell("attempt", attempt)
            server.attempt(0, attempt)


def wrong_client(directory: Path) -> int:
    """Count second vectors for one request, also when it is asked again, and vectors that no row has charged."""
    outside = Outside(directory)
    server = server_of(directory)
    answers: dict[tuple[str, str], set[str]] = {}
    for client, request, vector in outside.told("vector"):
        answers.setdefault((client, request), set()).add(vector)
    for client, request in outside.told("request"):
        with suppress(D2PFedError):
            again = server.ask_frame(int(client), (directory / request).read_bytes())
            answers.setdefault((client, request), set()).add(digest("vector", again).hex())
    found = sum(len(each) - 1 for each in answers.values())
    for client in range(CLIENTS):
        log = read_client_config(directory_of(directory, client)).log.read()
        charged = len(log.bodies(Entry.CHARGE))
        found += max(0, sum(key[0] == str(client) for key in answers) - charged)
    return found


@dataclass(frozen=True)
class Scenario:
    """Who lives, from what, and what must never be found afterwards."""

    prepare: Callable[[Path], None]
    live: Callable[[Path, int | None], None]
    wrong: Callable[[Path], int]


def _half_done(directory: Path) -> None:
    """A run of which one round is done and another was asked for, and nothing more is known."""
    outside = Outside(directory)
    kept = Masked.unmask

    def dies(masked: Masked) -> Sum:
        if masked.session.round:
            raise OutsideError
        return kept(masked)

    with patch.object(Masked, "unmask", dies), suppress(OutsideError):
        serve(directory)
    assert outside.told("asked")


SCENARIOS = {
    "server": Scenario(lambda _directory: None, serve, wrong_server),
    "resume": Scenario(_half_done, serve, wrong_server),
    "client": Scenario(enrolled, participate, wrong_client),
}
