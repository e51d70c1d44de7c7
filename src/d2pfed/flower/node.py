"""`d2pfed-node`: a client's process that loads Flower, d2pfed and torch once, and answers each message in a fork.

    d2pfed-node --app DIRECTORY -- --superlink HOST:PORT --root-certificates FILE ...   # starts its SuperNode, too
    d2pfed-node --app DIRECTORY --runtime 127.0.0.1:8001                                # serves one that runs already

The app is the one in a directory of this machine, or the one that the SuperLink sends if its SHA-256 is the given one.
"""

import argparse
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from d2pfed.accounting import SERVER, Sampling
from d2pfed.deploy.transport import Pace
from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.ledger.files import create_file
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.round import Attempt, Participant, gather, session_of

if TYPE_CHECKING:
    from d2pfed.flower.runtime import AppSource, Runtime

FLOWER = "1.41"  # whose private runtime interface `runtime.py` speaks

_LONGEST_PAUSE = 0.5
_SUPERNODE = "supernode"  # the word with which this program runs Flower's SuperNode
_log = logging.getLogger("d2pfed.deploy")


def require_flower(found: str) -> None:
    """Refuse any other minor version of Flower than the one whose interface is spoken."""
    if found.split(".")[:2] != FLOWER.split("."):
        raise ConfigError(
            f"the warm node is for Flower {FLOWER}, got {found}: use flower-supernode with its own executor"
        )


def preload(names: Sequence[str]) -> None:
    """Load modules once, for all messages; those that are not installed are left out."""
    for name in names:
        if name and find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def rehearse() -> None:
    """Run a private sum between made-up clients in this process: what it loads and compiles, no message has to."""
    clients = 0, 1, 2
    target = PrivacyTarget(
        dimension=1024,
        population=len(clients),
        cohort_size=len(clients),
        rounds=1,
        epsilon=1e3,
        delta=1e-5,
        against=SERVER,
        sampling=Sampling.NONE,
        dropouts=0.0,
        colluders=0.0,
    )
    plan = calibrate(target)
    session = session_of(plan, Attempt("rehearsal", 0, 0), clients)
    update = np.zeros(target.dimension, np.float32)
    machines = {
        client: Participant(plan=plan, client=client, entropy=Entropy.system(), participations=0).join(
            session, lambda _task, _model: update
        )
        for client in clients
    }
    gather(
        session, b"", lambda asked: ((client, machines[client].receive(asked[client])) for client in asked)
    ).unmask()


def reseed() -> None:
    """Give a fork generators of its own: numpy's and torch's global ones would repeat in each; Python's does not.

    They shuffle what an app trains on. Noise and keys never come from them.
    """
    fresh = Entropy.system().stream()
    for name, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)(int.from_bytes(fresh.bytes(4), "little"))


def bypass_proxies() -> None:
    """Keep what is for this machine on it: a proxy of the environment is asked for loopback, too, unless told not."""
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    os.environ["no_proxy"] = f"{excluded},127.0.0.1,localhost,::1".removeprefix(",")


def follow(parent: int, number: signal.Signals) -> None:
    """Have this process end by a signal once its parent has: what is orphaned would keep a restarted node out."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LONGEST_PAUSE)
        os.kill(os.getpid(), number)

    Thread(target=watch, daemon=True).start()


def serve(runtime: "Runtime", source: "AppSource", supernode: "subprocess.Popen[bytes] | None") -> None:
    """Answer messages as a SuperNode hands them out, each in a fork, until it ends.

    A SuperNode waits for an answer before it takes the next message. But it may hand out one that it has lost
    meanwhile, and a fork that waits for that must not keep the next one waiting.
    """
    from d2pfed.flower.runtime import acquire  # noqa: PLC0415 - after the version is known

    client, pace, forks = runtime.client(None), Pace(_LONGEST_PAUSE), Forks()
    try:
        while supernode is None or supernode.poll() is None:
            forks.reap()
            token = acquire(client)
            if token is None:
                pace.pause(_LONGEST_PAUSE)
            else:
                pace.hurry()
                forks.start(runtime, token, source)
    finally:
        forks.end()


class Forks:
    """The processes that answer messages: each starts with all that is loaded here, and leaves nothing behind."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}

    def start(self, runtime: "Runtime", token: str, source: "AppSource") -> None:
        """Answer a message in a process of its own."""
        parent, child = os.getpid(), os.fork()
        if child:
            self._begun[child] = time.monotonic()
        else:
            follow(parent, signal.SIGKILL)
            _answer(runtime, token, source)

    def reap(self) -> None:
        """Take note of those that have ended."""
        for child in list(self._begun):
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                seconds = time.monotonic() - self._begun.pop(child)
                _log.info("a message took %.2f s (%.2f s of a core)", seconds, used.ru_utime + used.ru_stime)
                if code := os.waitstatus_to_exitcode(status):
                    _log.error("its process ended with %d; the SuperNode notices by its missing heartbeat", code)

    def end(self) -> None:
        """End those that are left."""
        for child in self._begun:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _answer(runtime: "Runtime", token: str, source: "AppSource") -> NoReturn:
    """Answer a message, and end this process."""
    from d2pfed.flower.runtime import answer  # noqa: PLC0415

    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reseed()
        answer(runtime, token, source)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must end here, whatever happens
        _log.exception("a message was not answered")
    finally:
        with suppress(BaseException):  # an app may have closed them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextmanager
def started_supernode(arguments: Sequence[str]) -> Iterator[tuple[str, bytes, "subprocess.Popen[bytes]"]]:
    """Start a SuperNode whose messages only this process is given; yield its address, the secret, and its process."""
    secret = Entropy.system().stream().bytes(KEY_BYTES)
    with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        create_file(Path(directory) / "secret", secret)
        own = ["--isolation", "process", "--host", "127.0.0.1", "--port", str(port)]
        own += ["--superexec-auth-secret-file", str(Path(directory) / "secret")]
        # -P: or what lies in the current directory comes before what is installed. Ours last: the last one counts.
        command = [sys.executable, "-P", "-m", "d2pfed.flower.node", _SUPERNODE, *arguments, *own]
        process = subprocess.Popen(command)  # noqa: S603 - this program itself
        try:
            yield f"127.0.0.1:{port}", secret, process
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Run the command."""
    arguments = sys.argv[1:]
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        require_flower(version("flwr"))
        if arguments[:1] == [_SUPERNODE]:
            from d2pfed.flower.runtime import run_supernode  # noqa: PLC0415

            follow(os.getppid(), signal.SIGTERM)
            run_supernode(arguments[1:])
        else:
            _main(arguments)
    except D2PFedError as error:
        sys.exit(f"d2pfed-node: {error}")


def _main(arguments: list[str]) -> None:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, supernode = _parse(arguments[:split]), arguments[split + 1 :]
    if bool(supernode) == (chosen.runtime is not None):
        raise ConfigError("either --runtime ADDRESS or, after --, the arguments of a SuperNode to start")
    _show_log()
    bypass_proxies()
    signal.signal(signal.SIGTERM, _stop)
    if not supernode:
        secret = None if chosen.secret is None else chosen.secret.read_bytes()
        certificates = None if chosen.root_certificates is None else chosen.root_certificates.read_bytes()
        _serve(chosen, chosen.runtime, certificates, secret, None)
        return
    with started_supernode(supernode) as (address, secret, process):
        _serve(chosen, address, None, secret, process)
        sys.exit(process.returncode)


def _show_log() -> None:
    """Show our own log; Flower shows its own."""
    shown, handler = logging.getLogger("d2pfed"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    shown.addHandler(handler)
    shown.setLevel(logging.INFO)


def _serve(
    chosen: argparse.Namespace,
    address: str,
    certificates: bytes | None,
    secret: bytes | None,
    process: "subprocess.Popen[bytes] | None",
) -> None:
    from d2pfed.flower.runtime import LocalApp, PinnedApp, Runtime  # noqa: PLC0415

    runtime = Runtime(address, certificates, secret)
    with tempfile.TemporaryDirectory() as place:  # outlives forks that are killed, and what they have unpacked
        source = PinnedApp(chosen.fab_sha256, Path(place)) if chosen.app is None else LocalApp(chosen.app)
        source.preload()
        rehearse()
        preload(["d2pfed.flower.client", *chosen.preload.split(",")])
        serve(runtime, source, process)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="d2pfed-node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    app = parser.add_mutually_exclusive_group(required=True)
    app.add_argument("--app", type=Path, help="directory of the app that this client runs, whatever it is sent")
    app.add_argument("--fab-sha256", help="SHA-256 of the app bundle that this client runs when it is sent it")
    parser.add_argument("--runtime", help="address of the runtime API of a SuperNode with --isolation process")
    parser.add_argument("--secret", type=Path, help="file that the SuperNode has as --superexec-auth-secret-file")
    parser.add_argument(
        "--root-certificates", type=Path, help="of the runtime API; without: plain HTTP, on loopback only"
    )
    parser.add_argument("--preload", default="torch", help="modules to load once, with commas; default: torch")
    return parser.parse_args(arguments)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    main()
