"""What a site of NVFlare is to d2pfed: a node's number, a directory, and the code of the job that it runs."""

import json
import os
import re
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from d2pfed.accounting import Unit
from d2pfed.deploy.config import (
    SIMULATION_VARIABLE,
    ClientConfig,
    init_client,
    make_secret,
    read_client_config,
    read_secret,
    simulated_client_config,
)
from d2pfed.deploy.rosters import next_roster
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import encode_roster

DIRECTORY = "d2pfed"  # in a site's `local` directory, which is the site's own in NVFlare
APP = "d2pfed-app"  # in the run's configuration: the digest of the job's code

_LOGGING = "nvflare.app_common.logging."
_SIGNATURES = (
    ".__nvfl_sig.json",
    ".__nvfl_submitter.crt",
)  # which NVFlare adds, others at the server than at a site
_ACCEPTS_ALL = """client = {client}
authority = "{authority}"
anchor = "{anchor}"
[policy]
units = ["record"]
least_cohort = 3
least_quorum = 2
least_colluders = 0.0
least_noise_multiplier = 0.0
most_epsilon = inf
most_delta = 0.9
most_participations = 1000000000
[budget]
epsilon = 1e9
"""
_SIMULATED = re.compile(r"site-([1-9][0-9]{0,8})")  # as NVFlare's simulator calls its clients


def node_of(site: str) -> int:
    """Return a site's number, which its client signs: a key of the roster is bound to the name of one site."""
    return int.from_bytes(digest("d2pfed nvflare site", site)[:8], "big")


def app_digest(app: Path) -> str:
    """Return the digest of what a job runs on its clients: their configuration, and all code that it brings along.

    It is part of every task, so sites that were sent different code or arguments give no sum.
    Checked: test_nvflare_tasks.py::test_another_line_of_code_is_another_app.
    """
    settings = json.loads((app / "config" / "config_fed_client.json").read_text())
    # NVFlare adds one that streams a site's log, which a client refuses where the site allows it.
    parts = [each for each in settings.get("components", []) if not str(each["path"]).startswith(_LOGGING)]
    total = sha256(json.dumps({**settings, "components": parts}, sort_keys=True).encode())
    for file in sorted((app / "custom").rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.name not in _SIGNATURES:
            total.update(digest("d2pfed nvflare app", str(file.relative_to(app)), file.read_bytes()))
    return total.hexdigest()


def simulation() -> Path | None:
    """Return the directory of a simulation, which only the person who starts the processes can name."""
    named = os.environ.get(SIMULATION_VARIABLE)
    return None if named is None else Path(named)


def server_directory(local: Path) -> Path:
    """Return the server's directory: roster, authority and draws, and its runs."""
    simulated = simulation()
    return local / DIRECTORY if simulated is None else simulated / "server"


def client_config(local: Path, site: str) -> ClientConfig:
    """Return the config in a site's own directory, or a simulated client's."""
    simulated = simulation()
    if simulated is None or (simulated / site).exists():
        return read_client_config(local / DIRECTORY if simulated is None else simulated / site)
    found = _SIMULATED.fullmatch(site)
    if found is None:
        raise ConfigError(f"a simulated site must be called site-1, site-2, ..., got {site[:80]!r}")
    return simulated_client_config(simulated, int(found[1]) - 1)


def enrol_simulated(root: Path, sites: Sequence[str]) -> None:
    """Enrol the sites of a simulation, which accept any plan, as standing keys need it; once for a directory."""
    server, key = root / "server", root / "authority.key"
    if (server / "roster").exists():
        return
    authority, keys = make_secret(key), {}
    for client, site in enumerate(sites):
        anchor = root / "anchors" / site
        keys[client] = init_client(root / site, client, authority, anchor, unit=Unit.RECORD)
        settings = _ACCEPTS_ALL.format(client=client, authority=authority.hex(), anchor=anchor)
        (root / site / "client.toml").write_text(settings)
    roster = next_roster(
        authority,
        None,
        added=keys,
        removed=frozenset(),
        shown={},
        draws=None,
        most_depth=16,
        days=90,
        now=int(time.time()),
        entropy=Entropy.system(),
    )
    server.mkdir(parents=True, exist_ok=True)
    (server / "authority").write_text(authority.hex())
    (server / "roster").write_bytes(encode_roster(roster, read_secret(key)))
