"""Heads of rosters and their certificates: what an authority publishes and a client goes by that holds no roster."""

import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from d2pfed.deploy.config import ClientConfig
from d2pfed.deploy.rosters import Clock, log_issued, secret_of
from d2pfed.errors import ConfigError
from d2pfed.ledger.client_log import ClientHistory
from d2pfed.ledger.files import FileError, create_file, read_file, replace_file
from d2pfed.ledger.rows import Head as Position
from d2pfed.secagg import Roster
from d2pfed.secagg.heads import (
    CertifiedRoster,
    SlotEnrolment,
    certify,
    decode_certificates,
    decode_head,
    decode_slip,
    encode_head,
    head_of,
)
from d2pfed.secagg.wire import ClientId, pack_integer

_FILE = "roster-head"  # in a client's directory


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """What stands for a roster where clients do not hold it: the head for all, and a slip for each."""

    head: bytes
    certified: CertifiedRoster

    def slip(self, client: ClientId) -> bytes:
        """Return the bytes for one client."""
        self.certified.roster.key(client)
        return self.certified.slip(bisect_left(self.certified.roster.clients, client))


def publish_head(file: Path, roster: Roster, authority_secret: bytes) -> None:
    """Write the head and the certificates of a roster beside its file, for the server; never over others."""
    create_file(_beside(file, "head"), encode_head(head_of(roster), authority_secret), mode=0o644)
    create_file(_beside(file, "certificates"), certify(roster, authority_secret).encode(), mode=0o644)


def read_head(file: Path, roster: Roster) -> PublishedHead:
    """Return the head and the certificates beside a roster's file, if they are that roster's."""
    head = _beside(file, "head").read_bytes()
    if decode_head(head, roster.authority) != head_of(roster):
        raise ConfigError(f"{_beside(file, 'head')} is the head of another roster than {roster.serial}")
    return PublishedHead(head, decode_certificates(_beside(file, "certificates").read_bytes(), roster))


def _beside(file: Path, name: str) -> Path:
    return file.with_name(f"{file.name}.{name}")


def accept_head(
    config: ClientConfig, data: bytes, slip: bytes, clock: Clock = time.time
) -> tuple[SlotEnrolment, ClientHistory]:
    """Return the enrolment under a roster's head and this client's slip, if it may go by them; the log knows it then.

    Guarantee: that of `accept_roster`, without the roster. Checked: test_flower_heads.py.
    """
    head = decode_head(data, config.authority)
    own, floor = decode_slip(slip, head, config.client)
    enrolment = SlotEnrolment(secret_of(config), own)
    history = log_issued(config, head, enrolment, Position(*floor), clock)
    file, kept = config.directory / _FILE, pack_integer(len(data), 4) + data + slip
    if read_file(file) != kept:
        replace_file(file, kept)
    return enrolment, history


def current_head(config: ClientConfig, clock: Clock = time.time) -> tuple[SlotEnrolment, ClientHistory]:
    """Return the enrolment under the head and the slip that this client has."""
    kept = read_file(config.directory / _FILE)
    if kept is None:
        raise FileError(f"there is no head of a roster in {config.directory}: it comes with a run's announcement")
    size = 4 + int.from_bytes(kept[:4], "little")
    return accept_head(config, kept[4:size], kept[size:], clock)
