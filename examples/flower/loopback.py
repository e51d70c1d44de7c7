"""A whole federation on one machine: certificates, keys, a roster, a SuperLink and SuperNodes as processes.

Every process talks TLS to the SuperLink over loopback, and every SuperNode authenticates with a key of its own. This is
what docs/deploy.md does by hand on three machines.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from d2pfed.deploy.config import init_client, make_secret, read_secret
from d2pfed.deploy.heads import publish_head
from d2pfed.deploy.rosters import make_draws, next_roster, read_roster, shown_positions
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import encode_roster

SETTINGS = """client = {client}
authority = "{authority}"
anchor = "{anchor}"

[policy]
units = ["client", "record"]
least_cohort = {least_cohort}
least_quorum = {least_quorum}
least_colluders = {least_colluders}
least_noise_multiplier = 0.0
most_epsilon = 1e6
most_delta = 0.5

[budget]
epsilon = 1e6
delta = 1e-5
"""


@dataclass
class Federation:
    """The processes of a federation under one directory; closing it ends those that it started."""

    directory: Path
    clients: int
    least_cohort: int = 3
    least_quorum: int = 3
    least_colluders: float = 0.1
    environment: Mapping[str, str] = field(default_factory=dict)
    app: Path | None = None  # where given: warm nodes that have this app; else Flower's own executor
    preload: str = "torch"  # what warm nodes load beside it
    database: str = (
        ":flwr-in-memory:"  # a file outlives the SuperLink, but is locked when many nodes answer at once
    )

    def __enter__(self) -> Self:
        self._logs = ExitStack()
        self._started: list[subprocess.Popen[bytes]] = []
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.certificate, self._key = make_certificate(self.directory, "superlink")
        self.server.mkdir(exist_ok=True)
        self.authority = make_secret(self.directory / "authority.key").hex()
        (self.server / "authority").write_text(self.authority)
        self.sign_roster({client: self.add_client(client) for client in range(self.clients)})
        (self.directory / "flower").mkdir(exist_ok=True)
        self.set_trusted(self.certificate)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:  # all at once, so that they end side by side
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in list(self._started):
            self.end(process)
        self._logs.close()
        end_strays(self.directory / "flower")

    def client_directory(self, client: int) -> Path:
        """Return a client's own directory."""
        return self.directory / f"client-{client}"

    @property
    def roster(self) -> Path:
        """The roster as the authority has signed it."""
        return self.server / "roster"

    @property
    def draws(self) -> Path:
        """The server's own file of draws."""
        return self.server / "draws"

    @property
    def server(self) -> Path:
        """The server's own directory."""
        return self.directory / "server"

    def start_superlink(self, name: str = "superlink") -> None:
        """Start the SuperLink and wait until its port answers."""
        files = {"certfile": self.certificate, "keyfile": self._key, "ca-certfile": self.certificate}
        self.superlink = self._start(
            name,
            "flower-superlink",
            *(part for name, file in files.items() for part in (f"--ssl-{name}", str(file))),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--database", self.database, "--host", "127.0.0.1", "--port", str(self.port)),
        )
        wait_for_port(self.port, self.superlink)

    def start_simulation(self) -> None:
        """Start Flower's own simulation in place of the SuperLink: its clients are not enrolled."""
        (self.directory / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "{self.address}"\n'
            f"insecure = true\noptions.num-supernodes = {self.clients}\n"
            "options.backend.client-resources.num-cpus = 1\n"
        )
        self.environment = {"D2PFED_SIMULATION": str(self.directory / "simulated")} | dict(self.environment)
        self.superlink = self._start(
            "superlink",
            "flower-superlink",
            *("--insecure", "--simulation", "--disable-runtime-dependency-installation"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        )
        wait_for_port(self.port, self.superlink)

    def start_supernode(
        self,
        client: int,
        certificate: Path | None = None,
        name: str = "supernode",
        pin: str | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Start a client's SuperNode, trusting the SuperLink's certificate unless another is given.

        `pin` is the SHA-256 of the bundle that a warm node runs; None: the app of this machine. `more` are further
        options of it.
        """
        own = f'd2pfed-directory="{self.client_directory(client)}"'
        config = f"{own} partition-id={client} num-partitions={self.clients}"
        app = ("--app", str(self.app)) if pin is None else ("--fab-sha256", pin)
        warm = ("-m", "d2pfed.flower.node", *app, *more, "--preload", self.preload, "--")
        self.nodes[client] = self._start(
            f"{name}-{client}",
            *(("flower-supernode",) if self.app is None else ("python", *warm)),
            *("--root-certificates", str(certificate or self.certificate), "--superlink", self.address),
            *("--auth-supernode-private-key", str(self.directory / f"node-{client}")),
            *(("--port", str(free_port())) if self.app is None else ()),
            *("--node-config", config),
        )

    def register(self, client: int) -> None:
        """Let the SuperLink know a SuperNode's public key."""
        self.flwr("supernode", "register", str(self.directory / f"node-{client}.pub"), "loopback")

    def run(self, app: Path, config: Mapping[str, object]) -> int:
        """Submit an app and return the number of its run."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        answer = self.flwr("run", str(app), "loopback", "--run-config", pairs, "--format", "json")
        return int(json.loads(answer)["run-id"])

    def flwr(self, *arguments: str) -> str:
        """Run a command of Flower's and return what it prints."""
        done = subprocess.run(
            [_program("flwr"), *arguments],
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout} {done.stderr}")
        return done.stdout

    def log(self, name: str) -> str:
        """Return what a process has printed so far."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def add_client(self, client: int) -> bytes:
        """Make what a client makes by hand, its directory and the key of its SuperNode; return its public key."""
        authority, anchor = bytes.fromhex(self.authority), self.directory / "anchors" / str(client)
        public = init_client(self.client_directory(client), client, authority, anchor)
        settings = SETTINGS.format(
            client=client,
            authority=self.authority,
            anchor=anchor,
            least_cohort=self.least_cohort,
            least_quorum=self.least_quorum,
            least_colluders=self.least_colluders,
        )
        (self.client_directory(client) / "client.toml").write_text(settings)
        make_node_key(self.directory / f"node-{client}")
        return public

    def sign_roster(
        self,
        added: Mapping[int, bytes],
        removed: AbstractSet[int] = frozenset(),
        positions: Iterable[Path] = (),
    ) -> None:
        """Make what server and authority make by hand: new draws, and the next roster, in the place of those before."""
        secret, before = read_secret(self.directory / "authority.key"), None
        if self.roster.exists():
            before = read_roster(self.roster, self.authority).roster
        fresh = self.draws.with_name("draws.next")
        signed = next_roster(
            bytes.fromhex(self.authority),
            before,
            added=added,
            removed=removed,
            shown=shown_positions(before, positions),
            draws=make_draws(fresh),
            most_depth=16,
            days=30,
            now=int(time.time()),
            entropy=Entropy.system(),
        )
        fresh.replace(self.draws)
        for file in self.server.glob("roster*"):
            file.unlink()
        self.roster.write_bytes(encode_roster(signed, secret))
        publish_head(self.roster, signed, secret)

    def set_trusted(self, certificates: Path) -> None:
        """Tell Flower's commands where the SuperLink is, and which certificates they trust."""
        (self.directory / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "{self.address}"\n'
            f'root-certificates = "{certificates}"\n'
        )

    def renew_certificate(self, name: str, trusted: Path) -> None:
        """Make the SuperLink's next certificate; `trusted`, which clients get, holds the one before as well."""
        before = self.certificate.read_bytes()
        self.certificate, self._key = make_certificate(self.directory, name)
        trusted.write_bytes(before + self.certificate.read_bytes())

    def end(self, process: subprocess.Popen[bytes], *, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """End a process that was started here, and forget it: its number may soon be another's."""
        end(process, with_signal=with_signal)
        self._started.remove(process)

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self._logs.enter_context((self.directory / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            [_program(program), *arguments],
            env=self._environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with all that it has started itself
        )
        self._started.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        here = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.directory / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        return os.environ | here | dict(self.environment)


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def end(process: subprocess.Popen[bytes], *, with_signal: signal.Signals = signal.SIGTERM) -> None:
    """End a process that was started here, and what it has started itself: they are one process group."""
    for number in (with_signal, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
            if not _group_exists(process.pid):
                return
            time.sleep(1)


def end_strays(home: Path) -> None:
    """End what is left of a federation with this FLWR_HOME: an app that is stopped in mid-run has left its group."""
    mark = f"FLWR_HOME={home}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in file.read_bytes().split(b"\0") and int(file.parent.name) != os.getpid():
                os.kill(int(file.parent.name), signal.SIGKILL)


def _group_exists(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for loopback and return its file and that of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / f"{name}.pem", directory / f"{name}.key"
    files[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    files[1].chmod(0o600)
    return files


def make_node_key(file: Path) -> None:
    """Make the key with which a SuperNode authenticates to the SuperLink, as ssh-keygen would."""
    key = ec.generate_private_key(ec.SECP384R1())
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    file.chmod(0o600)
    file.with_name(f"{file.name}.pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Wait until a process listens on a port."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"nothing listens on port {port} after {seconds} s")
