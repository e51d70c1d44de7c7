"""A federation of real processes that is left alone with its supervisors while everything in it fails.

As a program (`campaign_soak.py faults 300 DIRECTORY SEED`) it runs a SuperLink and five or six warm nodes over TLS for
so many rounds, in runs of 25, most with standing keys, and lets each kind of fault happen once per 30 rounds, at
moments that the seed chooses. Nobody interferes but the supervisors of docs/deploy.md: what has ended is started again
after a delay, and an app that stopped before its end is submitted again. At the end the server's ledgers are held
against the clients' own logs. It prints one JSON object, and fails if a fault was not recovered from or if the ledgers
disagree. `SOAK_KEEP` names a directory that all files of the federation are copied to, and no fault begins after
`SOAK_MINUTES`.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loopback import Federation

from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.health import server_status
from d2pfed.ledger import decode_release, verify
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.ledger import read_rows
from d2pfed.ledger.rows import Key, RowKind
from d2pfed.ledger.state import LedgerState
from d2pfed.numerics.randomness import Entropy, Stream

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ROOT / "tests" / "flower_light"
CLIENTS = 5
RUN_ROUNDS = 25  # planned for a run: with the spare attempts, what a client's policy allows
ROUNDS_A_FAULT = 30  # of each kind
DELAY = 5.0  # seconds after which a supervisor starts again what has ended
STARTING = 60.0  # seconds that a submitted app has to open its run
PATIENCE = 600.0  # seconds without a finished round after which the federation counts as dead
WORTH = re.compile(r"refused|void|lost|waiting for|error|warn|killed|Exit Code", re.IGNORECASE)


@dataclass
class Fault:
    """One fault: what was done when, and what came of it."""

    kind: str
    what: str
    round: int  # rounds finished before it
    began: float
    recovered: float | None = None
    codes: list[str] = field(default_factory=list)  # exit codes that supervisors saw until then
    states: list[str] = field(default_factory=list)  # what `d2pfed deploy status` said until then
    seen: list[str] = field(default_factory=list)  # lines of the server's app until then


class Soak:
    """A federation with its supervisors and its faults."""

    def __init__(self, federation: Federation, size: int, stream: Stream) -> None:
        self.federation, self.size, self.stream = federation, size, stream
        self.kinds: dict[str, Callable[[], str]] = {
            "node killed": self.kill_node,
            "node stopped and woken": self.stop_node,
            "server app killed": self.kill_app,
            "SuperLink restarted": self.restart_superlink,
            "flwr stop and a new run": self.stop_run,
            "roster renewed": self.renew_roster,
            "client joined or revoked": self.change_clients,
            "certificate renewed": self.renew_certificate,
        }
        each = max(1, size // ROUNDS_A_FAULT)
        self.schedule = [kind for _ in range(each) for kind in shuffled(list(self.kinds), stream)]
        self.until = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "inf"))
        self.members = set(range(CLIENTS))
        self.names = CLIENTS  # the next client's
        self.faults: list[Fault] = []
        self.trusted = federation.directory / "trusted.pem"
        shutil.copy(federation.certificate, self.trusted)
        self.signals = federation.directory / "signals"
        self.signals.mkdir()
        (self.signals / "planted").write_text("planted")
        self.finished = 0  # rounds of earlier runs
        self.runs = 0
        self.submitted = -STARTING
        self.run_id: int | None = None
        self.is_last = False  # the run that goes on is the last one
        self.supervised = True  # an operator who has stopped the run submits it himself
        self.died: dict[str, float] = {}
        self.codes: list[str] = []
        self.states: dict[str, None] = {}
        self.asleep: dict[int, float] = {}  # nodes that are stopped, and when they are woken
        self.read_until = 0.0
        self.since = 0  # rounds that were finished at the last fault
        self.submissions = 0

    # What supervisors do.

    def start(self) -> None:
        """Start everything that a federation has."""
        federation = self.federation
        federation.start_superlink()
        federation.set_trusted(self.trusted)
        for client in sorted(self.members):
            federation.register(client)
            self.start_node(client)

    def start_node(self, client: int) -> None:
        """Start a node with the certificates that its client trusts now."""
        self.federation.start_supernode(client, certificate=self.trusted)

    def supervise(self) -> None:
        """Start again what has ended, after a delay; wake who has slept enough; submit an app that has stopped."""
        federation, now = self.federation, time.monotonic()
        if self.has_ended("superlink", federation.superlink):
            federation.end(federation.superlink)
            with suppress(RuntimeError):
                federation.start_superlink()
        for client in sorted(self.members):
            if self.has_ended(f"node {client}", federation.nodes[client]):
                federation.end(federation.nodes[client])
                self.start_node(client)
        for client, until in list(self.asleep.items()):
            if now > until:
                del self.asleep[client]
                with suppress(ProcessLookupError):  # it was restarted meanwhile
                    os.killpg(federation.nodes[client].pid, signal.SIGCONT)
        if self.supervised and not self.is_at_work():
            self.submit()

    def has_ended(self, name: str, process: subprocess.Popen[bytes]) -> bool:
        """Say whether a process has ended and its supervisor's delay is over."""
        code = process.poll()
        if code is None:
            return False
        if name not in self.died:
            self.died[name] = time.monotonic()
            self.codes.append(f"{name.split(maxsplit=1)[0]} {code}")
        return time.monotonic() > self.died[name] + DELAY and self.died.pop(name) > 0

    def is_at_work(self) -> bool:
        """Say whether an app works on the run, or may be about to; a run at its end is put away for the next one."""
        run = self.federation.server / "run"
        if (run / "plan.json").exists():
            status = server_status(self.federation.server)
            state = status.facts["state"]
            self.states |= dict.fromkeys([str(state), *status.problems])
            if state == "at work":
                return True
            if state == "complete" and self.is_last:
                return True
            if state == "complete":
                self.put_away()
                self.submitted = -STARTING
                return False
        return time.monotonic() < self.submitted + STARTING and bool(self.apps() or self.is_fresh())

    def is_fresh(self) -> bool:
        """Say whether an app was submitted so recently that its process may not have started."""
        return time.monotonic() < self.submitted + STARTING / 3

    def submit(self) -> None:
        """Submit the app, as docs/deploy.md does; a SuperLink that is not there is asked again later."""
        federation, size = self.federation, len(self.members)
        seconds = {"joining-seconds": 120.0, "keys-seconds": 60.0, "training-seconds": 60.0}
        config: dict[str, object] = {"cohort": size, "rounds": RUN_ROUNDS, "dropouts": 0.2, "colluders": 0.1}
        config |= {"keys": "attempt" if self.runs % 4 == 3 else "standing", "signals": str(self.signals)}
        config |= {"roster": str(federation.roster), "authority": federation.authority}
        config |= {"draws": str(federation.draws), "directory": str(federation.server / "run")}
        self.submitted = time.monotonic()
        try:
            self.run_id = federation.run(LIGHT, config | seconds)
            self.submissions += 1
        except (RuntimeError, subprocess.TimeoutExpired, ValueError, KeyError):
            self.submitted = time.monotonic() - STARTING + DELAY

    def put_away(self) -> None:
        """Keep the run that has ended, or was given up, under a name that no later run has."""
        self.finished += rounds_of(self.federation.server / "run")
        (self.federation.server / "run").rename(self.federation.server / f"past-{self.runs}")
        self.runs += 1

    def wait(self, condition: Callable[[], object], why: str, seconds: float = PATIENCE) -> None:
        """Supervise until something holds; time in which this process itself was stopped does not count."""
        left, last = seconds, time.monotonic()
        while not condition():
            now = time.monotonic()
            left, last = left - min(now - last, DELAY), now
            if left < 0:
                raise SystemExit(f"after {seconds:g} s and {self.rounds()} rounds: {why}")
            self.supervise()
            time.sleep(0.3)

    # What is seen.

    def rounds(self) -> int:
        """Return how many rounds are finished in all runs."""
        return self.finished + rounds_of(self.federation.server / "run")

    def survivors(self) -> int:
        """Return how many clients are in the last sum of this run."""
        file = self.federation.server / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["survivors"]) if lines else 0

    def last_began(self) -> float:
        """Return when the last finished round of this run began, by the clock of files; 0.0 if there is none."""
        file = self.federation.server / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return file.stat().st_mtime - float(json.loads(lines[-1])["seconds"]) if lines else 0.0

    def is_whole(self) -> bool:
        """Say whether every client was in the last sum, in a round that began after the last fault."""
        is_up = not self.asleep and not self.died and self.rounds() > self.since + 1
        return is_up and self.survivors() == len(self.members)

    def apps(self) -> list[int]:
        """Return the processes of server apps of this federation."""
        mark = f"FLWR_HOME={self.federation.directory / 'flower'}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - a path's glob fails if one ends meanwhile
            process = Path("/proc", name)
            with suppress(OSError):
                if (
                    mark in (process / "environ").read_bytes()
                    and b"flwr-serverapp" in (process / "cmdline").read_bytes()
                ):
                    found.append(int(name))
        return found

    # The faults. Each returns a word on what was done.

    def kill_node(self) -> str:
        """Kill all processes of a client's machine."""
        client = self.choose(sorted(self.members))
        self.federation.nodes[client].send_signal(signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.federation.nodes[client].pid, signal.SIGKILL)
        return f"client {client}"

    def stop_node(self) -> str:
        """Stop all processes of a client's machine for some time; some are longer than Flower's heartbeats."""
        client, seconds = self.choose(sorted(self.members)), (3, 20, 90)[self.stream.below(3)]
        os.killpg(self.federation.nodes[client].pid, signal.SIGSTOP)
        self.asleep[client] = time.monotonic() + seconds
        return f"client {client} for {seconds} s"

    def kill_app(self) -> str:
        """Kill the server's app."""
        killed = 0
        while not killed:
            self.wait(self.apps, "no app to kill")
            for process in self.apps():
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(process, signal.SIGKILL)
                    killed += 1
        return "app"

    def restart_superlink(self) -> str:
        """Kill the SuperLink; its supervisor starts it again."""
        os.killpg(self.federation.superlink.pid, signal.SIGKILL)
        return "SuperLink"

    def stop_run(self) -> str:
        """Stop the run and submit it again."""
        self.operate(lambda: None)
        return f"run {self.run_id}"

    def renew_roster(self) -> str:
        """Sign the next roster with the same clients, and go on with the run under it."""
        self.operate(lambda: self.federation.sign_roster({}, positions=self.positions()))
        return f"{len(self.members)} clients"

    def change_clients(self) -> str:
        """Enrol a client or revoke one: another population, so another run."""
        federation, positions = self.federation, self.positions()
        if len(self.members) > CLIENTS:
            client = self.choose(sorted(self.members))

            def revoke() -> None:
                self.members.remove(client)
                federation.sign_roster({}, {client}, positions)
                federation.end(federation.nodes[client])
                self.asleep.pop(client, None)
                self.died.pop(f"node {client}", None)
                self.put_away()

            self.operate(revoke)
            return f"client {client} revoked"
        client, self.names = self.names, self.names + 1

        def join() -> None:
            federation.sign_roster({client: federation.add_client(client)}, positions=positions)
            federation.register(client)
            self.start_node(client)
            self.members.add(client)
            self.put_away()

        self.operate(join)
        return f"client {client} joined"

    def renew_certificate(self) -> str:
        """Give clients the next certificate beside the old one, restart their nodes, then the SuperLink with it."""
        federation, number = self.federation, sum(fault.kind == "certificate renewed" for fault in self.faults)

        def renew() -> None:
            federation.renew_certificate(f"superlink-{number}", self.trusted)
            for client in sorted(self.members):
                if client not in self.asleep:
                    federation.end(federation.nodes[client])
                    self.died.pop(f"node {client}", None)
                    self.start_node(client)
            federation.end(federation.superlink)
            self.died.pop("superlink", None)
            federation.start_superlink()

        self.operate(renew)
        return f"certificate {number}"

    def operate(self, work: Callable[[], None]) -> None:
        """Do what an operator does between two runs: stop the app, work, submit it again."""
        self.wait(self.is_at_work, "no run to stop")
        self.supervised = False
        if self.run_id is not None:
            with suppress(RuntimeError, subprocess.TimeoutExpired):  # it may have ended meanwhile
                self.federation.flwr("stop", str(self.run_id), "loopback")
        self.wait(lambda: not self.apps(), "the stopped app does not end")
        work()
        self.supervised = True
        self.is_at_work()  # a run that had come to its end by itself is put away
        self.submit()

    def positions(self) -> list[Path]:
        """Return what the server's runs remember of their clients, for the next roster's floors."""
        found = self.federation.server.glob("*/positions-*")
        return [file for file in found if not file.name.endswith(".lock")]

    def choose(self, among: list[int]) -> int:
        """Return one of these."""
        return among[self.stream.below(len(among))]

    # The whole.

    def run(self) -> None:
        """Let each fault happen, spread over the rounds; what has a node away waits until all are back."""
        self.start()
        total = len(self.schedule)
        for number, kind in enumerate(self.schedule):
            if time.monotonic() > self.until:
                self.size = self.rounds()
                break
            self.wait(lambda due=number * self.size // total: self.rounds() >= due, "no further round")
            if kind.startswith(("node", "client", "certificate")):
                self.wait(self.is_whole, "a client does not come back")
            time.sleep(self.stream.below(2000) / 1000)
            self.recover(self.happen(kind))
        self.wait(lambda: self.rounds() >= self.size and self.is_whole(), "no further round")
        self.is_last = True
        if time.monotonic() < self.until:  # with a limit of time, the last run is left as it is
            self.wait((self.federation.server / "run" / "models.json").exists, "the last run has no end")
        self.put_away()

    def happen(self, kind: str) -> Fault:
        """Let a fault happen."""
        self.read_lines()
        self.codes.clear()
        self.states.clear()
        fault = Fault(kind, "", self.rounds(), time.monotonic())
        self.since = fault.round
        self.faults.append(fault)
        fault.what = self.kinds[kind]()
        self.report(f"{fault.kind} ({fault.what}) after round {fault.round}")
        return fault

    def recover(self, fault: Fault) -> None:
        """Wait until a round that began after the fault is finished, and note what an operator has seen until then."""
        after, happened = self.rounds(), time.time()
        self.wait(lambda: self.rounds() > after and self.last_began() > happened, f"no round after {fault.kind}")
        fault.recovered = time.monotonic()
        fault.codes, fault.states = list(self.codes), list(self.states)
        fault.seen = self.read_lines()
        self.report(f"  a round after {fault.recovered - fault.began:.0f} s, exit codes {fault.codes}")

    def read_lines(self) -> list[str]:
        """Return what the server's apps have said of interest since the last call, without numbers of nodes."""
        file = self.federation.directory / "superlink.db"
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database, suppress(sqlite3.Error):
            query = "SELECT timestamp, log FROM task_logs WHERE timestamp > ? ORDER BY timestamp"
            rows = database.execute(query, (self.read_until,)).fetchall()
            self.read_until = max((row[0] for row in rows), default=self.read_until)
            lines = "".join(row[1] for row in rows).splitlines()
            return [re.sub(r"\d{6,}", "N", line)[:200] for line in lines if WORTH.search(line)]
        return []

    def report(self, text: str) -> None:
        """Say how far it is."""
        print(f"{time.strftime('%H:%M:%S')} {self.rounds()} rounds: {text}", file=sys.stderr, flush=True)


def shuffled(values: list[str], stream: Stream) -> list[str]:
    """Return the values in an order that the stream chooses."""
    left, order = list(values), []
    while left:
        order.append(left.pop(stream.below(len(left))))
    return order


def rounds_of(run: Path) -> int:
    """Return how many rounds of a run are finished."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@dataclass(frozen=True)
class Books:
    """What both sides have written down of one run: the server's attempts, and each client's charges."""

    attempts: Mapping[Key, tuple[RowKind, tuple[int, ...]]]  # the last row of each, and who is in it
    charges: Mapping[int, frozenset[Key]]
    rounds: int  # finished, as the server's metrics say


def read_books(run: Path, clients: Iterable[Path]) -> Books:
    """Read the ledger of a run, once it was verified, and the logs of clients."""
    verify(run / "ledger.sqlite")
    state = LedgerState(read_rows(run / "ledger.sqlite"))
    attempts = {key: (each.kind, each.release.participants) for key, each in state.attempts.items()}
    names, charges = {key.run for key in attempts}, {}
    for directory in clients:
        config = read_client_config(directory)
        releases = [decode_release(str(body["release"])) for body in config.log.read().bodies(Entry.CHARGE)]
        charges[config.client] = frozenset(
            Key(each.run, each.round, each.attempt) for each in releases if each.run in names
        )
    return Books(attempts, charges, rounds_of(run))


def disagreements(books: Books) -> list[str]:
    """Return where the books of the two sides do not fit.

    A released sum has the charge of everybody in it; a charge of a client belongs to an attempt that the server has
    reserved with that client in its cohort; every finished round has one release at least.
    """
    found = []
    for key, (kind, participants) in books.attempts.items():
        if kind is RowKind.COMMIT:
            found += [
                f"{key}: client {client} is in the sum and has not charged it"
                for client in participants
                if key not in books.charges[client]
            ]
    for client, keys in books.charges.items():
        found += [
            f"{key}: charged by client {client}, unknown to the server" for key in keys - books.attempts.keys()
        ]
        found += [
            f"{key}: charged by client {client}, which is not in the cohort"
            for key in keys & books.attempts.keys()
            if books.attempts[key][0] is RowKind.RESERVE and client not in books.attempts[key][1]
        ]
    released = {key.round for key, (kind, _) in books.attempts.items() if kind is RowKind.COMMIT}
    if not released >= set(range(books.rounds)):
        found.append(f"{books.rounds} rounds are finished, and only rounds {sorted(released)} were released")
    return found


def tally(faults: list[Fault]) -> dict[str, object]:
    """Return, for each kind of fault, how often it happened, what it took and what was seen."""
    table: dict[str, object] = {}
    for kind in dict.fromkeys(fault.kind for fault in faults):
        same = [fault for fault in faults if fault.kind == kind]
        seconds = [fault.recovered - fault.began for fault in same if fault.recovered is not None]
        lines = Counter(re.sub(r"\d+(\.\d+)?", "0", line) for fault in same for line in set(fault.seen))
        table[kind] = {
            "count": len(same),
            "recovered": len(seconds),
            "median_seconds_to_next_round": round(statistics.median(seconds), 1) if seconds else None,
            "slowest": round(max(seconds), 1) if seconds else None,
            "exit_codes": dict(Counter(code for fault in same for code in fault.codes)),
            "deploy_status": dict(Counter(state for fault in same for state in fault.states)),
            "lines": [line for line, _ in lines.most_common(6)],
        }
    return table


def faults(size: int, directory: Path, seed: str) -> dict[str, object]:
    """Run the soak and hold the books against each other."""
    stream, begun = Entropy.replay(seed.encode()).stream(), time.monotonic()
    place = directory / "federation"
    ended = ""
    with Federation(
        place,
        CLIENTS,
        environment={"PYTHONPATH": str(ROOT / "src")},
        database=str(place / "superlink.db"),
        app=LIGHT,
        preload="",
    ) as federation:
        soak = Soak(federation, size, stream)
        try:
            soak.run()
        except SystemExit as error:
            ended = str(error)
    if kept := os.environ.get("SOAK_KEEP"):
        shutil.copytree(directory, kept, dirs_exist_ok=True)
    clients = sorted(place.glob("client-*"))
    runs = sorted(file.parent for file in federation.server.glob("*/ledger.sqlite"))
    books = [read_books(run, clients) for run in runs]
    wrong = [each for book in books for each in disagreements(book)] + [ended] * bool(ended)
    kinds = Counter(kind for book in books for kind, _ in book.attempts.values())
    charged = sum(len(keys) for book in books for keys in book.charges.values())
    in_sums = sum(
        len(clients) for book in books for kind, clients in book.attempts.values() if kind is RowKind.COMMIT
    )
    rounds = sum(book.rounds for book in books)
    return {
        "campaign": "soak of a deployed federation",
        "result": f"{rounds} rounds in {len(runs)} runs over {CLIENTS} to {CLIENTS + 1} real nodes, {len(soak.faults)} "
        f"faults of {len(soak.kinds)} kinds, {soak.submissions} submissions: {kinds[RowKind.COMMIT]} releases, "
        f"{kinds[RowKind.RESERVE]} attempts charged without one, {kinds[RowKind.VOID]} void; {charged} vectors charged "
        f"by clients, {in_sums} of them in sums; {len(wrong)} disagreements of ledgers or faults without recovery",
        "rounds": rounds,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "faults": tally(soak.faults),
        "wrong": wrong,
        "failed": len(wrong),
    }


def main() -> None:
    """Run the soak and print what came of it."""
    name, size, directory, seed = sys.argv[1:5]
    if name != "faults":
        raise SystemExit(f"there is no campaign soak-{name}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    found = faults(int(size), Path(directory), seed)
    print(json.dumps(found))
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    main()
