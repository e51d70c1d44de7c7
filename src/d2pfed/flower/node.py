"""`d2pfed-node`: a client's process that loads Flower, d2pfed and torch once, and answers each message in a fork.

    d2pfed-node --app DIRECTORY -- --superlink HOST:PORT --root-certificates FILE ...   # starts its SuperNode, too
    d2pfed-node --app DIRECTORY --runtime 127.0.0.1:8001                                # serves one that runs already

An app is in a directory of this machine, or is sent by the SuperLink and has a given SHA-256. Both options may be
repeated: each message is then answered by the app of its run.
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
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

from d2pfed.accounting import SERVER, Sampling
from d2pfed.deploy.transport import Pace
from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.ledger.files import create_file
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.plan import PrivacyTarget, ProtocolChoice, calibrate
from d2pfed.round import Attempt, Participant, gather, session_of
from d2pfed.round.aggregation import InProcess, Machine

if TYPE_CHECKING:
    from d2pfed.flower.runtime import Apps, Runtime

FLOWER = "1.41"  # whose private runtime interface `runtime.py` speaks

_LONGEST_PAUSE = 0.5
_SUPERNODE = "supernode"  # the word with which this program runs Flower's SuperNode
_log = logging.getLogger("d2pfed.deploy")


def require_flower(found: str) -> None:
    """Refuse any other minor version of Flower than the one whose interface is spoken."""
    if found.split(".")[:2] != FLOWER.split("."):
        raise ConfigError(
            f"d2pfed-node needs Flower {FLOWER}, got {found}: use flower-supernode with its own executor"
        )


def rehearse() -> None:
    """Run private sums between made-up clients in this process: what they load and compile, no message has to."""
    update = np.zeros(1024, np.float32)
    for protocol, count in ((ProtocolChoice.PAIRWISE, 3), (ProtocolChoice.LATTICE, 24)):
        target = PrivacyTarget(
            dimension=update.size,
            population=count,
            cohort_size=count,
            rounds=1,
            epsilon=1e3,
            delta=1e-5,
            against=SERVER,
            sampling=Sampling.NONE,
            dropouts=0.0,
            colluders=0.0,
            protocol=protocol,
        )
        plan = calibrate(target)
        session = session_of(plan, Attempt("rehearsal", 0, 0), tuple(range(count)))
        machines = dict[int, Machine]()
        for client in session.cohort:
            own = Participant(plan=plan, client=client, entropy=Entropy.system(), participations=0)
            machines[client] = own.join(session, lambda _task, _model: update)
        gather(session, b"", InProcess(machines.__getitem__).exchange).unmask()


def reseed() -> None:
    """Give a fork its own global generators of numpy and torch: an app shuffles by them, and they would repeat."""
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


def serve(runtime: "Runtime", apps: "Apps", supernode: "subprocess.Popen[bytes] | None") -> None:
    """Answer messages as a SuperNode hands them out, each in a fork, until it ends.

    It may hand out a message that it has lost meanwhile, and a fork that waits for that must not hold up the next one.
    """
    from d2pfed.flower.runtime import acquire  # noqa: PLC0415 - after the version is known

    client, pace, begun = runtime.client(None), Pace(_LONGEST_PAUSE), dict[int, float]()
    try:
        while supernode is None or supernode.poll() is None:
            for child in list(begun):
                ended, status, used = os.wait4(child, os.WNOHANG)
                if ended:
                    seconds = time.monotonic() - begun.pop(child)
                    _log.info("a message took %.2f s (%.2f s of a core)", seconds, used.ru_utime + used.ru_stime)
                    if code := os.waitstatus_to_exitcode(status):
                        _log.error(
                            "its process ended with %d; the SuperNode notices by its missing heartbeat", code
                        )
            token = acquire(client)
            if token is None:
                pace.pause(_LONGEST_PAUSE)
            else:
                pace.hurry()
                begun[fork(runtime, token, apps)] = time.monotonic()
    finally:
        for child in begun:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def fork(runtime: "Runtime", token: str, apps: "Apps") -> int:
    """Answer a message in a process of its own, which starts with all that is loaded here and ends when it has."""
    from d2pfed.flower.runtime import answer  # noqa: PLC0415

    parent, child = os.getpid(), os.fork()
    if child:
        return child
    code = 1
    try:
        follow(parent, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reseed()
        answer(runtime, token, apps)
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
    parser = argparse.ArgumentParser(
        prog="d2pfed-node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--app",
        type=Path,
        action="append",
        default=[],
        help="directory of an app on this machine",
    )
    parser.add_argument(
        "--fab-sha256",
        action="append",
        default=[],
        help="SHA-256 of an app bundle to accept from the SuperLink",
    )
    parser.add_argument("--runtime", help="address of the runtime API of a SuperNode with --isolation process")
    parser.add_argument("--secret", type=Path, help="the SuperNode's --superexec-auth-secret-file")
    parser.add_argument(
        "--root-certificates", type=Path, help="CA of the runtime API; default: plain HTTP, on loopback only"
    )
    parser.add_argument(
        "--preload", default="torch", help="modules to load once, separated by commas; default: torch"
    )
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        require_flower(version("flwr"))
        if arguments[:1] == [_SUPERNODE]:
            from d2pfed.flower.runtime import run_supernode  # noqa: PLC0415

            follow(os.getppid(), signal.SIGTERM)
            run_supernode(arguments[1:])
            return
        split = arguments.index("--") if "--" in arguments else len(arguments)
        chosen, supernode = parser.parse_args(arguments[:split]), arguments[split + 1 :]
        if not (chosen.app or chosen.fab_sha256):
            raise ConfigError(
                "name the apps that this client runs: --app DIRECTORY or --fab-sha256 HEX, or several"
            )
        if bool(supernode) == (chosen.runtime is not None):
            raise ConfigError("either --runtime ADDRESS or, after --, the arguments of a SuperNode to start")
        log, handler = logging.getLogger("d2pfed"), logging.StreamHandler()  # Flower shows its own log
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        bypass_proxies()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        certificates: bytes | None = None
        secret: bytes | None = None
        process: subprocess.Popen[bytes] | None = None
        with ExitStack() as stack:
            if supernode:
                address, secret, process = stack.enter_context(started_supernode(supernode))
            else:
                address, files = chosen.runtime, (chosen.root_certificates, chosen.secret)
                certificates, secret = (None if file is None else file.read_bytes() for file in files)
            from d2pfed.flower.runtime import Apps, LocalApp, PinnedApp, Runtime  # noqa: PLC0415

            runtime = Runtime(address, certificates, secret)
            # Outlives forks that are killed, and what they have unpacked.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pinned = [PinnedApp(each, place) for each in chosen.fab_sha256]
            apps = Apps((*map(LocalApp, chosen.app), *pinned))
            apps.preload()
            rehearse()
            for name in ["d2pfed.flower.client", *chosen.preload.split(",")]:
                if name and find_spec(name.partition(".")[0]) is not None:  # what is not installed is left out
                    importlib.import_module(name)
            serve(runtime, apps, process)
            if process is not None:
                sys.exit(process.returncode)
    except D2PFedError as error:
        sys.exit(f"d2pfed-node: {error}")


if __name__ == "__main__":
    main()
