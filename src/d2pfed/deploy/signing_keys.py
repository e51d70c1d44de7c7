"""Signing keys of clients, authorities and signers of certificates, each in a file of its owner."""

import os
from pathlib import Path

from d2pfed.errors import ConfigError
from d2pfed.ledger.files import OTHERS_MAY_USE, create_file, read_file
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.secagg.crypto import signing_public


def make_secret(file: Path) -> bytes:
    """Make a private key and return its public half; never overwrites one."""
    secret = Entropy.system().require_system().stream().bytes(KEY_BYTES)
    try:
        create_file(file, secret)
    except FileExistsError:
        raise ConfigError(f"{file} holds a key already") from None
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
