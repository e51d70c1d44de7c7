"""A provisioned NVFlare network on one machine: a server and sites as processes over TLS, and enrolled clients.

This is what docs/deploy.md does by hand on several machines: `nvflare provision`, `d2pfed client init` in each site's
own `local/d2pfed`, and the roster in that of the server.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from d2pfed.deploy.config import init_client, make_secret, read_secret
from d2pfed.deploy.heads import publish_head
from d2pfed.deploy.rosters import make_draws, next_roster
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import encode_roster

ADMIN = "admin@nvidia.com"
STORES = "/tmp/nvflare/"  # where NVFlare's servers keep jobs and snapshots
PROJECT = """api_version: 3
name: example
description: sites on one machine
participants:
- {{name: server, type: server, org: nvidia, fed_learn_port: {port}, admin_port: {port}, default_host: localhost}}
- {{name: admin@nvidia.com, type: admin, org: nvidia, role: project_admin}}
{sites}
builders:
- path: nvflare.lighter.impl.workspace.WorkspaceBuilder
  args: {{template_file: [master_template.yml, aws_template.yml, azure_template.yml]}}
- path: nvflare.lighter.impl.static_file.StaticFileBuilder
  args: {{config_folder: config}}
- path: nvflare.lighter.impl.cert.CertBuilder
{more}- path: nvflare.lighter.impl.signature.SignatureBuilder
"""
ENCRYPTED = """- path: nvflare.lighter.impl.he.HEBuilder
  args: {poly_modulus_degree: 8192, coeff_mod_bit_sizes: [60, 40, 40], scale_bits: 40, scheme: CKKS}
"""
# In a process of its own: a session of NVFlare's that is lost takes its process's threads along.
COMMAND = """import os
import sys
from nvflare.fuel.flare_api.flare_api import new_secure_session
kit, verb, argument = sys.argv[1:]
session = new_secure_session("admin@nvidia.com", kit, timeout=60.0)
if verb == "submit":
    print("answer:", session.submit_job(argument))
elif verb == "status":
    print("answer:", session.get_job_meta(argument)["status"])
else:
    print("answer:", len(session.get_system_info().client_info))
sys.stdout.flush()
os._exit(0)
"""
SETTINGS = """client = {client}
authority = "{authority}"
anchor = "{anchor}"
keys_on_disk = true
state = "{state}"

[policy]
units = ["client", "record"]
least_cohort = 3
least_quorum = 3
least_colluders = 0.0
least_noise_multiplier = 0.0
most_epsilon = 1e6
most_delta = 0.5

[budget]
epsilon = 1e6
delta = 1e-5
"""


@dataclass
class Network:
    """The processes of a network under one directory; closing it ends those that it started."""

    directory: Path
    sites: int
    is_encrypted: bool = False  # whether kits have keys of homomorphic encryption, for NVFlare's own recipes
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        names = "\n".join(f"- {{name: {name}, type: client, org: nvidia}}" for name in self.names)
        more = ENCRYPTED if self.is_encrypted else ""
        (self.directory / "project.yml").write_text(PROJECT.format(port=port, sites=names, more=more))
        command = [_program("nvflare"), "provision", "-p", "project.yml", "-w", "workspace"]
        subprocess.run(command, cwd=self.directory, env=self._environment(), check=True, capture_output=True)
        self._enrol()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    @property
    def names(self) -> list[str]:
        """The sites' names."""
        return [f"site-{number}" for number in range(1, self.sites + 1)]

    def kit(self, name: str) -> Path:
        """Return the startup kit of the server, a site or an admin."""
        return self.directory / "workspace" / "example" / "prod_00" / name

    def own(self, name: str) -> Path:
        """Return the directory of the server or of a site that d2pfed uses."""
        return self.kit(name) / "local" / "d2pfed"

    def start(self, *names: str) -> None:
        """Start the server or sites."""
        for name in names:
            log = (self.directory / f"{name}.log").open("ab")
            self.processes[name] = subprocess.Popen(
                ["/bin/bash", str(self.kit(name) / "startup" / "sub_start.sh"), "--once"],
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be ended with all that it has started itself
            )
            log.close()

    def bring_up(self, *names: str) -> None:
        """Start the server and wait for it, then sites; wait until all sites of the network are connected."""
        log = self.directory / "server.log"
        before = self.log("server").count("Server started") if log.exists() else 0
        self.start("server")
        self.wait_until(lambda: self.log("server").count("Server started") > before)
        self.start(*names)
        self.wait_until(lambda: self.admin("sites") == str(self.sites))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.log("server")[-4000:]
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """Kill the server or a site, with the processes of its jobs."""
        process = self.processes.pop(name)
        for each in (process.pid, *_descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()

    def admin(self, verb: str, argument: str = "") -> str:
        """Return what an admin is told: `submit` a job, its `status`, the connected `sites`."""
        command = [sys.executable, "-c", COMMAND, str(self.kit(ADMIN)), verb, argument]
        # NVFlare looks for files in all that is below the working directory.
        options = {"cwd": self.kit(ADMIN), "env": self._environment()}
        done = subprocess.run(command, **options, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return done.stdout.rpartition("answer: ")[2].strip()

    def log(self, name: str) -> str:
        """Return what a process has printed so far."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def _enrol(self) -> None:
        """Make what the authority, the server and the clients make by hand: keys, directories, draws, the roster."""
        authority, keys = make_secret(self.directory / "authority.key"), {}
        for client, name in enumerate(self.names):
            anchor = self.directory / "anchors" / name
            keys[client] = init_client(self.own(name), client, authority, anchor)
            state = self.directory / "keys" / name
            state.mkdir(parents=True, mode=0o700)
            settings = SETTINGS.format(client=client, authority=authority.hex(), anchor=anchor, state=state)
            (self.own(name) / "client.toml").write_text(settings)
            usual = (self.kit(name) / "local" / "resources.json.default").read_text()
            ours = usual.replace('"allow_log_streaming": true', '"allow_log_streaming": false')
            (self.kit(name) / "local" / "resources.json").write_text(ours)
        server = self.own("server")
        server.mkdir(parents=True)
        # NVFlare's own places are the same for all servers of a machine, which would take up each other's jobs.
        usual = (self.kit("server") / "local" / "resources.json.default").read_text()
        assert usual.count(STORES) == 2, usual
        (self.kit("server") / "local" / "resources.json").write_text(
            usual.replace(STORES, f"{self.directory}/stores/")
        )
        roster = next_roster(
            authority,
            None,
            added=keys,
            removed=frozenset(),
            shown={},
            draws=make_draws(server / "draws"),
            most_depth=16,
            days=30,
            now=int(time.time()),
            entropy=Entropy.system(),
        )
        secret = read_secret(self.directory / "authority.key")
        (server / "authority").write_text(authority.hex())
        (server / "roster").write_bytes(encode_roster(roster, secret))
        publish_head(server / "roster", roster, secret)

    def _environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(self.directory), "OMP_NUM_THREADS": "1"}
        return {name: value for name, value in os.environ.items() if name != "D2PFED_SIMULATION"} | own


def _program(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def _descendants(process: int) -> list[int]:
    """Return all processes that a process has started, and those that they have started."""
    parents: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(file.read_text().rpartition(")")[2].split()[1]), []).append(
                int(file.parent.name)
            )
    found, todo = list[int](), [process]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found
