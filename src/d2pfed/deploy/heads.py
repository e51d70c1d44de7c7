"""Heads of rosters and their certificates: what an authority publishes for clients that hold no roster."""

from dataclasses import dataclass
from pathlib import Path

from d2pfed.errors import ConfigError
from d2pfed.ledger.files import create_file
from d2pfed.secagg import Roster
from d2pfed.secagg.heads import CertifiedRoster, certify, decode_certificates, decode_head, encode_head, head_of
from d2pfed.secagg.wire import ClientId


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """What stands for a roster where clients do not hold it: the head for all, and a slip for each."""

    head: bytes
    certified: CertifiedRoster

    def slip(self, client: ClientId) -> bytes:
        """Return the bytes for one client."""
        return self.certified.slip(self.certified.name(client))


def publish_head(file: Path, roster: Roster, authority_secret: bytes) -> None:
    """Write the head and the certificates of a roster beside its file, for the server; never over others."""
    create_file(_beside(file, "head"), encode_head(head_of(roster), authority_secret), mode=0o644)
    create_file(_beside(file, "certificates"), certify(roster, authority_secret).encode(), mode=0o644)


def read_head(file: Path, roster: Roster) -> PublishedHead | None:
    """Return the head and the certificates beside a roster's file, if there are some; refuse another roster's."""
    if not _beside(file, "head").exists():
        return None
    head = _beside(file, "head").read_bytes()
    if decode_head(head, roster.authority) != head_of(roster):
        raise ConfigError(f"{_beside(file, 'head')} is not the head of roster {roster.serial}")
    return PublishedHead(head, decode_certificates(_beside(file, "certificates").read_bytes(), roster))


def _beside(file: Path, name: str) -> Path:
    return file.with_name(f"{file.name}.{name}")
