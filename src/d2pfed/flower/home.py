"""A client's own directory: who it is, whom it trusts, what it insists on. Nothing in it comes from the server."""

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, get_origin, get_type_hints

from d2pfed.errors import ConfigError
from d2pfed.flower.keys import decode_public, make_secret, read_secret
from d2pfed.ledger.client_log import ClientLog
from d2pfed.ledger.private_files import create_file, make_directory, read_file, require_directory
from d2pfed.numerics.randomness import KEY_BYTES, digest
from d2pfed.plan import MechanismName, Policy
from d2pfed.secagg import Consistency
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.wire import ID_LIMIT

NODE_SETTING = "d2pfed-home"  # in the SuperNode's --node-config
SIMULATION_VARIABLE = "D2PFED_SIMULATION"  # set by whoever starts a simulation; no server can set it
NOBODY = bytes(KEY_BYTES)  # in the place of the authority where nobody is enrolled

_TYPES = {"client": int, "consistency": str, "authority": str, "anchor": str, "policy": dict, "budget": dict}
_SETTINGS = """client = {client}
authority = "{authority}"  # whose signature under a roster counts
{anchor}  # where the head of this client's log is kept, outside of this directory and of backups

[policy]  # what this client insists on, whatever a server proposes
least_cohort = 10
least_quorum = 8
least_colluders = 0.1  # the share of all enrolled clients that may help the server
most_epsilon = {epsilon}  # of one plan, as this client computes it
most_delta = 1e-4

[budget]  # what all runs together may spend of this client, against the server and the colluders of each plan
epsilon = {epsilon}
delta = 1e-5
"""


@dataclass(frozen=True, slots=True)
class ClientBudget:
    """What all runs together may cost one client, against the server and the colluders that each plan allows for."""

    epsilon: float = 10.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise ConfigError(f"a budget's epsilon must be positive and finite, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"a budget's delta must be in (0, 1), got {self.delta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A client's settings. Without a key it believes that the server keeps to the protocol."""

    path: Path
    client: int
    authority: bytes
    anchor: Path
    policy: Policy
    budget: ClientBudget  # of this client, over all runs
    secret: bytes | None = field(repr=False)

    def __post_init__(self) -> None:
        require_identity(self.client)
        if self.anchor.resolve().is_relative_to(self.path.resolve()):
            raise ConfigError(f"the anchor must be outside of the home {self.path}, got {self.anchor}")

    @property
    def consistency(self) -> Consistency:
        """How this client knows that all were told the same."""
        return Consistency.ASSUMED if self.secret is None else Consistency.SIGNED

    @property
    def log(self) -> ClientLog:
        """This client's log and its anchor."""
        return ClientLog(self.path, self.anchor, self.authority, self.client)


def default_anchor(authority: bytes, client: int) -> Path:
    """Return where an anchor is kept unless the settings say otherwise: under the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "d2pfed" / digest("d2pfed anchor", authority, client).hex()[:32]


def require_identity(client: int) -> None:
    """Refuse what cannot be a client's identity."""
    if not 0 <= client < ID_LIMIT:
        value = client if client.bit_length() < 128 else f"a number of {client.bit_length()} bits"
        raise ConfigError(f"a client's identity must be in [0, 2^64), got {value}")


def init_home(
    path: Path, client: int, authority: bytes, anchor: Path | None = None, epsilon: float = 10.0
) -> bytes:
    """Make a client's directory, key, settings and log, and return its public key; overwrites nothing.

    What is wrong with the arguments is found before anything is written, and a call that was interrupted may be
    repeated; once there is a log, or an anchor of this client on this machine, every further call is refused.
    """
    home = Home(
        path=path,
        client=client,
        authority=authority,
        anchor=default_anchor(authority, client) if anchor is None else anchor.absolute(),
        policy=Policy(),
        budget=ClientBudget(epsilon),
        secret=None,
    )
    named = {"client": client, "authority": authority.hex(), "anchor": _anchor_line(anchor), "epsilon": epsilon}
    text = _SETTINGS.format(**named).encode()
    settings, key = path / "client.toml", path / "key"
    if (found := read_file(settings)) not in (None, text) or home.log.has_begun():
        raise ConfigError(f"{path} is a client's home already, and nothing in it was changed")
    home.log.require_new()
    make_directory(path)
    make_directory(home.anchor)
    public = signing_public(read_secret(key)) if key.exists() or key.is_symlink() else make_secret(key)
    if found is None:
        create_file(settings, text)
    home.log.create({"carried": "nothing"})
    return public


def _anchor_line(anchor: Path | None) -> str:
    example = Path("/another/volume/d2pfed") if anchor is None else anchor.absolute()
    return f"{'# ' if anchor is None else ''}anchor = {json.dumps(str(example))}"


def read_home(path: Path) -> Home:
    """Read a home: client.toml, and for an enrolled client its private key."""
    require_directory(path)
    settings = _settings(path / "client.toml")
    unknown = sorted(set(settings) - set(_TYPES))
    if unknown:
        raise ConfigError(f"{path / 'client.toml'} has unknown settings: {', '.join(unknown)}")
    try:
        _require_types(settings, _TYPES)
        client, authority = settings["client"], _authority(settings)
        anchor = settings.get("anchor")
        return Home(
            path=path,
            client=client,
            authority=authority,
            anchor=Path(anchor).expanduser() if anchor is not None else default_anchor(authority, client),
            policy=Policy(**_table(settings, "policy", Policy)),
            budget=ClientBudget(**_table(settings, "budget", ClientBudget)),
            secret=None if authority == NOBODY else read_secret(path / "key"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / 'client.toml'} is not a client's settings: {error!r}") from error


def simulated_home(root: Path, partition: object) -> Home:
    """Return the home of a simulated client, which goes along with any plan that has a cohort of two.

    Only here a log is begun without a person: it protects nobody.
    """
    if not isinstance(partition, int):
        raise ConfigError(f"a simulated client needs a partition-id, got {partition!r}")
    home = Home(
        path=root / f"client-{partition}",
        client=partition,
        authority=NOBODY,
        anchor=root / "anchors" / str(partition),
        policy=_anything(),
        budget=ClientBudget(1e9),
        secret=None,
    )
    make_directory(home.path)
    if not (home.anchor.exists() or (home.path / "log").exists()):
        home.log.create({"carried": "nothing"})
    return home


def _anything() -> Policy:
    return Policy(
        mechanisms=tuple(MechanismName),
        least_cohort=2,
        least_quorum=2,
        least_colluders=0.0,
        least_noise_multiplier=0.0,
        most_epsilon=math.inf,
        most_delta=1.0,
        most_participations=1 << 31,
    )


def _table(settings: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    """Return a table of settings that all have the type of their field."""
    table: dict[str, Any] = settings.get(name, {})
    hints = get_type_hints(kind)
    _require_types(table, {name: list if get_origin(hint) is tuple else hint for name, hint in hints.items()})
    return table


def _require_types(settings: Mapping[str, object], types: Mapping[str, type]) -> None:
    """Refuse a setting of another type: true is no number, and 7.5 no identity."""
    for name, value in settings.items():
        expected = types.get(name, object)
        fits = isinstance(value, (int, float) if expected is float else expected)
        if not fits or (isinstance(value, bool) and expected is not object):
            raise TypeError(f"{name} must be of type {expected.__name__}, got {shortened(value)}")


def _authority(settings: Mapping[str, object]) -> bytes:
    consistency = Consistency(settings.get("consistency", Consistency.SIGNED.value))
    return NOBODY if consistency is Consistency.ASSUMED else decode_public(str(settings["authority"]))


def _settings(file: Path) -> dict[str, Any]:
    data = read_file(file)
    if data is None:
        raise ConfigError(f"cannot read {file}: there is no such file; see `d2pfed client init`")
    try:
        return tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
