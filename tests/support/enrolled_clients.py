"""Enrolled clients, an authority, its rosters and a plan, all under one directory; needs no Flower."""

import time
from collections.abc import Mapping
from pathlib import Path

from d2pfed.accounting import SERVER, Sampling
from d2pfed.deploy.config import init_client, make_secret, read_secret
from d2pfed.deploy.heads import PublishedHead
from d2pfed.deploy.rosters import DrawCommitment, SignedRoster, make_draws, next_roster
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.secagg import Roster, encode_roster
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.heads import certify, encode_head, head_of
from d2pfed.secagg.trust import Consistency

DEPTH = 6
DIMENSION = 16


def enrol(directory: Path, clients: int, depth: int | None = DEPTH, **settings: object) -> SignedRoster:
    """Directories of enrolled clients under one directory, and the server's draws beside them."""
    authority = make_secret(directory / "authority.key")
    keys = {
        client: init_client(directory_of(directory, client), client, authority, anchor_in(directory, client))
        for client in range(clients)
    }
    for client in range(clients):
        write_settings(directory, client, authority, settings)
    committed = None if depth is None else make_draws(directory / "draws", depth)
    return sign_roster(directory, keys, None, committed)


def write_settings(directory: Path, client: int, authority: bytes, changes: Mapping[str, object]) -> None:
    """A client that accepts a cohort of three and hardly any noise."""
    policy = {
        "units": ["client", "record"],
        "least_cohort": 3,
        "least_quorum": 3,
        "least_noise_multiplier": 0.0,
        "least_colluders": 0.0,
    }
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
    (directory_of(directory, client) / "client.toml").write_text("\n".join(lines))


def directory_of(directory: Path, client: int) -> Path:
    return directory / f"client-{client}"


def anchor_in(directory: Path, client: int) -> Path:
    return directory / f"anchor-{client}"


def sign_roster(
    directory: Path,
    keys: Mapping[int, bytes],
    before: Roster | None,
    committed: DrawCommitment | None,
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
    published = PublishedHead(encode_head(head_of(roster), secret), certify(roster, secret))
    return SignedRoster(roster, encode_roster(roster, secret), published)


def make_plan(clients: int = 5, rounds: int = 2, **changes: object) -> Plan:
    """A plan with so little noise that a sum shows who is in it."""
    target: dict[str, object] = {
        "dimension": DIMENSION,
        "population": clients,
        "cohort_size": clients,
        "rounds": rounds,
        "sampling": Sampling.NONE,
        "against": SERVER,
        "epsilon": 5000.0,
        "delta": 1e-5,
        "dropouts": 0.4,
        "spare": 4,
        "consistency": Consistency.SIGNED,
    }
    return calibrate(PrivacyTarget(**(target | changes)))


def noise_bound(plan: Plan, survivors: int) -> float:
    """Eight standard deviations of a coordinate of the mean: exceeded with probability below 1e-14."""
    spread = plan.mechanism.noise(plan.codec, survivors)
    return 8 * float(spread.sigma) * survivors**0.5 * plan.codec.granularity / plan.cohort_size
