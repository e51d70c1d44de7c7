"""A client's own directory: who it is, whom it trusts, what it insists on. Nothing in it comes from the server."""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from d2pfed.accounting import SERVER
from d2pfed.errors import ConfigError
from d2pfed.ledger import Budget
from d2pfed.plan import Policy
from d2pfed.secagg import Consistency, Enrolment, decode_roster
from d2pfed.wire import ID_LIMIT

NODE_SETTING = "d2pfed-home"  # in the SuperNode's --node-config
SIMULATION_VARIABLE = "D2PFED_SIMULATION"  # set by whoever starts a simulation; no server can set it
_EVERY = 1 << 31  # participations: all that were recorded count


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A client's settings. Without an enrolment it believes that the server keeps to the protocol."""

    path: Path
    client: int
    policy: Policy
    budget: Budget  # of this client, against the server, over all runs
    enrolment: Enrolment | None

    def __post_init__(self) -> None:
        if not 0 <= self.client < ID_LIMIT:
            raise ConfigError(f"a client's identity must be in [0, 2^64), got {self.client}")
        if self.enrolment is not None:
            self.enrolment.require_self(self.client)

    @property
    def consistency(self) -> Consistency:
        """How this client knows that all were told the same."""
        return Consistency.ASSUMED if self.enrolment is None else Consistency.SIGNED

    @staticmethod
    def of(context: Context) -> "Home":
        """Return the home that the SuperNode's own configuration names, or that of a simulated client."""
        named = context.node_config.get(NODE_SETTING)
        if named is not None:
            return read_home(Path(str(named)))
        simulated = os.environ.get(SIMULATION_VARIABLE)
        if simulated is None:
            raise ConfigError(
                f"a client needs a home: start its SuperNode with --node-config '{NODE_SETTING}=\"DIRECTORY\"', "
                f"or a simulation with {SIMULATION_VARIABLE}=DIRECTORY"
            )
        return _simulated(Path(simulated), context.node_config.get("partition-id"))


def read_home(path: Path) -> Home:
    """Read a home: client.toml, and for an enrolled client its private key and the roster."""
    settings = _settings(path / "client.toml")
    unknown = sorted(set(settings) - {"client", "consistency", "authority", "policy", "budget"})
    if unknown:
        raise ConfigError(f"{path / 'client.toml'} has unknown settings: {', '.join(unknown)}")
    try:
        return Home(
            path=path,
            client=int(settings["client"]),
            policy=Policy(**settings.get("policy", {})),
            budget=_budget(settings.get("budget", {})),
            enrolment=_enrolment(path, settings),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / 'client.toml'} is not a client's settings: {error!r}") from error


def _settings(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _budget(settings: Mapping[str, float]) -> Budget:
    return Budget(float(settings.get("epsilon", 10.0)), float(settings.get("delta", 1e-5)), SERVER, _EVERY)


def _enrolment(path: Path, settings: Mapping[str, object]) -> Enrolment | None:
    consistency = Consistency(settings.get("consistency", Consistency.SIGNED.value))
    if consistency is Consistency.ASSUMED:
        return None
    authority = bytes.fromhex(str(settings["authority"]))
    return Enrolment(read_secret(path / "key"), decode_roster(_bytes(path / "roster"), authority))


def read_secret(file: Path) -> bytes:
    """Return a private key; refuse one that others can read."""
    data = _bytes(file)
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"{file} must be readable by its owner alone: chmod 600 {file}")
    if len(data) != 32:
        raise ConfigError(f"{file} must have 32 bytes, got {len(data)}")
    return data


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _simulated(root: Path, partition: object) -> Home:
    """Return the home of a simulated client, which goes along with any plan that has a cohort of two."""
    if not isinstance(partition, int):
        raise ConfigError(f"a simulated client needs a partition-id, got {partition!r}")
    anything = Policy(
        least_cohort=2, least_quorum=2, least_noise_multiplier=0.0, most_epsilon=math.inf, most_delta=1.0
    )
    path = root / f"client-{partition}"
    path.mkdir(parents=True, exist_ok=True)
    return Home(
        path=path, client=partition, policy=anything, budget=Budget(1e9, 1e-5, SERVER, _EVERY), enrolment=None
    )
