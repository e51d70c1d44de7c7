"""A client's own configuration: identity, keys, authority, policy and budget. Nothing in it comes from the server."""

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, get_origin, get_type_hints

from d2pfed.accounting import Unit
from d2pfed.errors import ConfigError, shown
from d2pfed.ledger.client_log import ClientLog
from d2pfed.ledger.files import OTHERS_MAY_USE, create_file, make_directory, read_file, require_directory
from d2pfed.numerics.randomness import KEY_BYTES, Entropy, digest
from d2pfed.plan import MechanismName, Policy
from d2pfed.secagg import Consistency
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.wire import ID_LIMIT

NODE_SETTING = "d2pfed-directory"  # in the SuperNode's --node-config
APP_SETTING = "d2pfed-app"  # there, too: which app answers; `d2pfed-node` sets it to the app that it has loaded
SIMULATION_VARIABLE = "D2PFED_SIMULATION"  # set by the process that starts a simulation; no server can set it
NOBODY = bytes(KEY_BYTES)  # instead of an authority's key, where nobody is enrolled

_TYPES = {
    "client": int,
    "consistency": str,
    "authority": str,
    "anchor": str,
    "state": str,
    "keys_on_disk": bool,
    "policy": dict,
    "budget": dict,
    "apps": dict,
}
_SETTINGS = """client = {client}
authority = "{authority}"  # whose signature under a roster counts
{anchor}  # where the head of this client's log is kept: outside this directory, and not in backups

[policy]  # what this client requires, whatever a server proposes
protocols = ["pairwise", "lattice", "standing"]  # for up to 1,000 clients, 64 or more, up to 128 silos
units = {units}  # what a plan must protect: all data of this client, or each record ("record")
requests = ["training", "statistics", "evaluation"]  # what a server may ask this client's data for
extras = ["adaptive_clip", "weights", "failures"]  # what may be sent with the update, under the same clip and noise
mechanisms = ["centered", "ddgauss", "skellam"]  # each client's noise is its own and no other client knows it
least_cohort = 10  # clients of a round
most_cohort = 20000
least_quorum = 8  # clients in a sum that may be opened
least_colluders = 0.1  # the share of all enrolled clients that may help the server
least_noise_multiplier = 0.3  # honest clients' noise in that sum, divided by its sensitivity to one client
most_epsilon = {epsilon}  # of one plan, as this client computes it
most_delta = 1e-4  # the chance that this epsilon fails
most_participations = 100  # vectors of this client in one run
most_clip_norm = inf  # the longest update
most_bits = 32  # per coordinate that is sent
most_dimension = 134217728  # coordinates
most_fraction_bits = 12  # the finest centers of the noise: a table of 2^12 rows
most_rounds = 100000  # of one run
most_attempts_per_round = 100

[budget]  # what all runs together may spend of this client, against the server and the colluders of each plan
epsilon = {epsilon}
delta = 1e-5

# With a table like this one, only the apps that have one are served; without, every app of this client's node.
# [apps."publisher/name"]
# epsilon = 2.0  # what this app may spend of the budget; default: all of it
# policy = {{ requests = ["training"] }}  # its own rules instead of those above
"""


def make_secret(file: Path) -> bytes:
    """Make a private key and return its public half; never overwrites one."""
    secret = Entropy.system().require_system().stream().bytes(KEY_BYTES)
    try:
        create_file(file, secret)
    except FileExistsError:
        raise ConfigError(f"{file} already holds a key") from None
    return signing_public(secret)


def read_secret(file: Path) -> bytes:
    """Return a private key; refuse one that others can read, and links."""
    data = read_file(file, forbidden=OTHERS_MAY_USE)
    if data is None:
        raise ConfigError(f"there is no key in {file}")
    if len(data) != KEY_BYTES:
        raise ConfigError(f"{file} must have {KEY_BYTES} bytes, got {len(data)}")
    return data


def default_signing_key() -> Path:
    """Return where this user's key for certificates is, if no other is named."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "d2pfed" / "certificate.key"


def decode_public(text: str) -> bytes:
    """Return a public key from its hexadecimal digits."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"a public key has {2 * KEY_BYTES} hexadecimal digits, got {text[:80]!r}")
    return key


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


@dataclass(frozen=True, slots=True)
class AppTerms:
    """What one app is allowed: its own limit within the client's budget, and its own rules."""

    policy: Policy
    epsilon: float = math.inf

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"an app's epsilon must be positive, got {self.epsilon}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """A client's settings. Without a key it assumes that the server keeps to the protocol."""

    directory: Path
    client: int
    authority: bytes
    anchor: Path
    policy: Policy
    budget: ClientBudget  # of this client, over all runs
    secret: bytes | None = field(repr=False)
    state: Path | None = None  # where keys are kept, in memory; None: where the system offers it
    keys_on_disk: bool = False  # whether they may be kept on a disk, whose backups void the guarantee
    apps: Mapping[str, AppTerms] = field(default_factory=dict)  # the apps that are served; empty: every one
    app: str = ""  # the one that answers; empty where all are served alike

    def __post_init__(self) -> None:
        require_identity(self.client)
        if self.anchor.resolve().is_relative_to(self.directory.resolve()):
            raise ConfigError(
                f"the anchor must be outside the client's directory {self.directory}, got {self.anchor}"
            )

    @property
    def log(self) -> ClientLog:
        """This client's log and its anchor."""
        return ClientLog(self.directory, self.anchor, self.authority, self.client)

    def serving(self, app: str) -> "ClientConfig":
        """Return the settings under which an app answers; refuse one that is not listed, where some are.

        Checked: test_flower_apps.py::test_an_app_that_is_not_listed_is_refused.
        """
        if not self.apps:
            return self
        if app not in self.apps:
            raise ConfigError(f"this client serves only the apps {', '.join(self.apps)}, got {app or 'no name'}")
        return replace(self, app=app, policy=self.apps[app].policy)


def default_anchor(authority: bytes, client: int) -> Path:
    """Return where an anchor is kept unless the settings say otherwise: under the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "d2pfed" / digest("d2pfed anchor", authority, client).hex()[:32]


def require_identity(client: int) -> None:
    """Refuse what cannot be a client's identity."""
    if not 0 <= client < ID_LIMIT:
        raise ConfigError(f"a client's identity must be in [0, 2^64), got {shown(client)}")


def init_client(
    directory: Path,
    client: int,
    authority: bytes,
    anchor: Path | None = None,
    epsilon: float = 10.0,
    *,
    unit: Unit = Unit.CLIENT,
) -> bytes:
    """Make a client's directory, key, settings and log, and return its public key; overwrites nothing.

    What is wrong with the arguments is found before anything is written, and a call that was interrupted may be
    repeated; once there is a log, or an anchor of this client on this machine, every further call is refused.
    """
    config = ClientConfig(
        directory=directory,
        client=client,
        authority=authority,
        anchor=default_anchor(authority, client) if anchor is None else anchor.absolute(),
        policy=Policy(units=(unit,)),
        budget=ClientBudget(epsilon),
        secret=None,
    )
    example = Path("/another/volume/d2pfed") if anchor is None else anchor.absolute()
    text = _SETTINGS.format(
        client=client,
        authority=authority.hex(),
        anchor=f"{'# ' if anchor is None else ''}anchor = {json.dumps(str(example))}",
        epsilon=epsilon,
        units=json.dumps([unit]),
    ).encode()
    settings, key = directory / "client.toml", directory / "key"
    if (found := read_file(settings)) not in (None, text) or config.log.has_begun():
        raise ConfigError(f"{directory} is already a client's directory; nothing in it was changed")
    config.log.require_new()
    make_directory(directory)
    make_directory(config.anchor)
    public = signing_public(read_secret(key)) if key.exists() or key.is_symlink() else make_secret(key)
    if found is None:
        create_file(settings, text)
    config.log.create({"carried": "nothing"})
    return public


def read_client_config(directory: Path) -> ClientConfig:
    """Read a client's directory: client.toml, and for an enrolled client its private key."""
    directory = directory.absolute()  # a user's function may change the working directory
    require_directory(directory)
    file = directory / "client.toml"
    data = read_file(file)
    if data is None:
        raise ConfigError(f"cannot read {file}: there is no such file; see `d2pfed client init`")
    try:
        settings: dict[str, Any] = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    if unknown := sorted(set(settings) - set(_TYPES)):
        raise ConfigError(f"{file} has unknown settings: {', '.join(unknown)}")
    try:
        _require_types(settings, _TYPES)
        is_assumed = Consistency(settings.get("consistency", Consistency.SIGNED)) is Consistency.ASSUMED
        client, authority = settings["client"], NOBODY if is_assumed else decode_public(settings["authority"])
        paths = {
            name: Path(settings[name]).expanduser().absolute() for name in ("anchor", "state") if name in settings
        }
        tables: dict[str, Any] = {}
        for name, kind in (("policy", Policy), ("budget", ClientBudget)):
            tables[name] = settings.get(name, {})
            _require_types(tables[name], _settings_of(kind))
        apps = dict[str, AppTerms]()
        for name, table in settings.get("apps", {}).items():
            _require_types({name: table}, {name: dict})
            _require_types(table, {"epsilon": float, "policy": dict})
            _require_types(own := table.get("policy", {}), _settings_of(Policy))
            apps[name] = AppTerms(**{**table, "policy": Policy(**tables["policy"] | own)})
        return ClientConfig(
            directory=directory,
            client=client,
            authority=authority,
            anchor=paths.get("anchor") or default_anchor(authority, client),
            policy=Policy(**tables["policy"]),
            budget=ClientBudget(**tables["budget"]),
            secret=None if authority == NOBODY else read_secret(directory / "key"),
            state=paths.get("state"),
            keys_on_disk=settings.get("keys_on_disk", False),
            apps=apps,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is not a client's settings: {error!r}") from error


def simulated_client_config(root: Path, partition: object) -> ClientConfig:
    """Return the config of a simulated client, which accepts any plan and begins its own log: it protects nobody."""
    if not isinstance(partition, int):
        raise ConfigError(f"a simulated client needs a partition-id, got {partition!r}")
    config = ClientConfig(
        directory=root.absolute() / f"client-{partition}",
        client=partition,
        authority=NOBODY,
        anchor=root.absolute() / "anchors" / str(partition),
        policy=Policy(
            units=tuple(Unit),
            mechanisms=tuple(MechanismName),
            least_cohort=2,
            least_quorum=2,
            least_colluders=0.0,
            least_noise_multiplier=0.0,
            most_epsilon=math.inf,
            most_delta=1.0,
            most_participations=1 << 31,
        ),
        budget=ClientBudget(1e9),
        secret=None,
    )
    make_directory(config.directory)
    if not (config.anchor.exists() or (config.directory / "log").exists()):
        config.log.create({"carried": "nothing"})
    return config


def _settings_of(kind: type) -> dict[str, type]:
    """Return the names and types of a table's settings."""
    return {key: list if get_origin(hint) is tuple else hint for key, hint in get_type_hints(kind).items()}


def _require_types(settings: Mapping[str, object], types: Mapping[str, type]) -> None:
    """Refuse a setting of another type: true is no number, and 7.5 no identity."""
    for name, value in settings.items():
        expected = types.get(name, object)
        fits = isinstance(value, (int, float) if expected is float else expected)
        if not fits or (isinstance(value, bool) and expected not in (object, bool)):
            raise TypeError(f"{name} must be of type {expected.__name__}, got {shortened(value)}")
