"""Homes of enrolled clients, an authority and its rosters, all under one directory; needs no Flower."""

import time
from collections.abc import Mapping
from pathlib import Path

from d2pfed.flower.authority import next_roster
from d2pfed.flower.draws import Committed, make_draws
from d2pfed.flower.home import init_home
from d2pfed.flower.keys import make_secret, read_secret
from d2pfed.flower.rosters import SignedRoster
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import Roster, encode_roster
from d2pfed.secagg.crypto import signing_public

DEPTH = 6


def enrol(directory: Path, clients: int, depth: int | None = DEPTH, **settings: object) -> SignedRoster:
    """Homes of enrolled clients under a directory, and the server's draws beside them."""
    authority = make_secret(directory / "authority.key")
    keys = {
        client: init_home(home_in(directory, client), client, authority, anchor_in(directory, client))
        for client in range(clients)
    }
    for client in range(clients):
        write_settings(directory, client, authority, settings)
    committed = None if depth is None else make_draws(directory / "draws", depth)
    return sign_roster(directory, keys, None, committed)


def write_settings(directory: Path, client: int, authority: bytes, changes: Mapping[str, object]) -> None:
    """A client that goes along with a cohort of three and hardly any noise."""
    policy = {"least_cohort": 3, "least_quorum": 3, "least_noise_multiplier": 0.0, "least_colluders": 0.0}
    policy |= {"most_epsilon": 1e6, "most_delta": 1e-4} | {
        name: changes[name] for name in changes if name != "budget"
    }
    lines = [
        f"client = {client}",
        f'authority = "{authority.hex()}"',
        f'anchor = "{anchor_in(directory, client)}"',
    ]
    lines += ["[policy]", *(f"{name} = {value}" for name, value in policy.items())]
    lines += ["[budget]", f"epsilon = {changes.get('budget', 1e6)}"]
    (home_in(directory, client) / "client.toml").write_text("\n".join(lines))


def home_in(directory: Path, client: int) -> Path:
    return directory / f"home-{client}"


def anchor_in(directory: Path, client: int) -> Path:
    return directory / f"anchor-{client}"


def sign_roster(
    directory: Path,
    keys: Mapping[int, bytes],
    before: Roster | None,
    committed: Committed | None,
    **changes: object,
) -> SignedRoster:
    """The authority's next roster."""
    secret = read_secret(directory / "authority.key")
    options: dict[str, object] = {
        "removed": frozenset(),
        "shown": {},
        "most_depth": 16,
        "days": 30,
        "now": int(time.time()),
    }
    roster = next_roster(
        signing_public(secret),
        before,
        added=keys,
        draws=committed,
        entropy=Entropy.system(),
        **(options | changes),
    )
    return SignedRoster(roster, encode_roster(roster, secret))
