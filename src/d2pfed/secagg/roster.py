"""The clients that somebody other than the server has enrolled, by their signing keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from d2pfed.errors import ConfigError, PeerError
from d2pfed.randomness import digest
from d2pfed.secagg import crypto
from d2pfed.secagg.messages import Kind
from d2pfed.wire import BINDING_BYTES, ClientId, frame, pack_ids, unframe

_UNBOUND = bytes(BINDING_BYTES)  # a roster belongs to no session


@dataclass(frozen=True, slots=True)
class Roster:
    """Enrolled clients and their public signing keys, no key twice."""

    keys: Mapping[ClientId, bytes]

    def __post_init__(self) -> None:
        require_one_key_each(list(self.keys.values()))
        object.__setattr__(self, "keys", MappingProxyType(dict(self.keys)))

    def key(self, client: ClientId) -> bytes:
        """Return a client's public signing key, or refuse a client that was not enrolled."""
        if client not in self.keys:
            raise PeerError(f"client {client} is not enrolled")
        return self.keys[client]


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What an enrolled client holds: its private signing key and the roster it trusts."""

    secret: bytes = field(repr=False)
    roster: Roster

    def require_self(self, client: ClientId) -> None:
        """Refuse to act for a client whose enrolled key is not this one."""
        if self.roster.key(client) != crypto.signing_public(self.secret):
            raise ConfigError(f"client {client} is enrolled with another key")


def require_one_key_each(keys: list[bytes]) -> None:
    """Refuse a roster in which one key plays several clients."""
    if len(set(keys)) != len(keys):
        raise PeerError("every enrolled client must have a key of its own")


def require_authority(authority: bytes, signature: bytes, statement: bytes) -> None:
    """Refuse a roster that somebody else has signed, the server for one."""
    crypto.require_signature(authority, signature, statement)


def encode_roster(roster: Roster, authority_secret: bytes) -> bytes:
    """Return a roster signed by the authority that enrolled its clients."""
    clients = sorted(roster.keys)
    body = pack_ids(clients) + b"".join(roster.keys[client] for client in clients)
    return frame(Kind.ROSTER, _UNBOUND, 0, body, crypto.sign(authority_secret, _statement(body)))


def decode_roster(data: bytes, authority: bytes) -> Roster:
    """Return a roster that this authority has signed.

    Guarantee: whoever cannot sign as the authority cannot add, drop or change a client.
    Checked: test_malicious_server.py (rosters signed by the server itself).
    """
    reader = unframe(data, Kind.ROSTER, _UNBOUND, 0)
    clients = reader.ids()
    keys = reader.records(len(clients), crypto.PUBLIC_BYTES)
    signature = reader.take(crypto.SIGNATURE_BYTES)
    reader.end()
    require_authority(authority, signature, _statement(pack_ids(clients) + b"".join(keys)))
    return Roster(dict(zip(clients, keys, strict=True)))


def _statement(body: bytes) -> bytes:
    return digest("d2pfed roster", body)
