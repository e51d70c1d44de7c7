"""Which roster a client goes by: the authority's newest, while it lasts, if it fits what this client's log says."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.client_config import ClientConfig
from d2pfed.flower.enrolment import decode_public
from d2pfed.ledger.client_log import ClientHistory, Entry
from d2pfed.ledger.files import FileError, read_file, replace_file
from d2pfed.ledger.rows import Head
from d2pfed.secagg import Enrolment, Roster, decode_roster
from d2pfed.secagg.roster import not_before, require_serial, require_unexpired

_log = logging.getLogger("d2pfed.flower")

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """A roster and its bytes as the authority has signed them, which travel to the clients."""

    roster: Roster
    data: bytes


def read_roster(file: Path, authority: str) -> SignedRoster:
    """Return the roster in a file, if this authority (its public key in hexadecimal) has signed it."""
    data = file.read_bytes()
    return SignedRoster(decode_roster(data, decode_public(authority)), data)


def accept_roster(config: ClientConfig, data: bytes, clock: Clock = time.time) -> tuple[Enrolment, ClientHistory]:
    """Return the enrolment under a roster, whoever brought it, if this client may go by it; the log knows it then.

    Guarantee: never an older roster than one before, never two of one serial, never an expired one, never one whose
    authority knows of a later position than this log holds. Checked: test_flower_rosters.py.
    """
    roster = decode_roster(data, config.authority)
    while True:
        history = config.log.read()
        _check(config, roster, history, clock)
        enrolment = Enrolment(_secret(config), roster)
        enrolment.require_self(config.client)
        if roster.serial == history.serial:
            break
        row = {"serial": roster.serial, "digest": roster.digest.hex(), "issued": roster.issued}
        added = config.log.append(history, Entry.ROSTER, row)
        if added is not None:
            history = added
            break
    if read_file(_file(config)) != data:
        replace_file(_file(config), data)
    return enrolment, history


def current_roster(config: ClientConfig, clock: Clock = time.time) -> tuple[Enrolment, ClientHistory]:
    """Return the enrolment under the roster that this client has."""
    data = read_file(_file(config))
    if data is None:
        raise FileError(
            f"there is no roster in {config.directory}: it comes with a run's announcement, or `d2pfed client enrol`"
        )
    return accept_roster(config, data, clock)


def read_own_roster(config: ClientConfig) -> Roster | None:
    """Return the roster in a client's directory, whether it is still good or not."""
    data = read_file(_file(config))
    return None if data is None else decode_roster(data, config.authority)


def require_floor(roster: Roster, client: int, history: ClientHistory) -> None:
    """Refuse a roster whose authority has seen a position of this client that its log lacks: it was lost or cloned."""
    count, head = roster.floors[client]
    if not history.holds(Head(count, head)):
        raise PeerError(f"the authority has seen position {count} of this client, which its log does not hold")


def _check(config: ClientConfig, roster: Roster, history: ClientHistory, clock: Clock) -> None:
    roster.key(config.client)
    try:
        require_serial(roster, history.serial, bytes.fromhex(history.roster))
    except PeerError as error:
        _log.error("this roster is not gone by: %s", error)
        raise
    require_unexpired(roster, not_before(int(clock()), latest_time(history, roster)))
    try:
        require_floor(roster, config.client, history)
    except PeerError:
        config.log.mark("in the authority's roster", Head(*roster.floors[config.client]))
        raise


def latest_time(history: ClientHistory, roster: Roster) -> int:
    """Return the latest time that this client has seen: no clock can be before it by more than a day."""
    issued = [body["issued"] for body in history.bodies(Entry.ROSTER) if isinstance(body["issued"], int)]
    return max(roster.issued, history.latest_seconds(), *issued, 0)


def _secret(config: ClientConfig) -> bytes:
    if config.secret is None:
        raise ConfigError("this client is not enrolled: its settings assume that the server keeps to the protocol")
    return config.secret


def _file(config: ClientConfig) -> Path:
    return config.directory / "roster"
