"""Where a silo's standing keys live: one file for each epoch, in a directory that is in memory only."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.client_config import ClientConfig
from d2pfed.ledger.keystore import KEYS_ON_DISK, VolatileFile, default_volatile
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import Epoch, StandingState, decode_standing_invitation
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.wire import Reader, kind_of, pack_integer

_log = logging.getLogger("d2pfed.flower")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The file of one epoch's keys, in memory that no backup restores."""

    config: ClientConfig
    file: VolatileFile

    @staticmethod
    def of(config: ClientConfig, epoch: bytes) -> "KeyFile":
        """Return the file of an epoch; refuses a place that is not in memory."""
        parent = config.state or default_volatile()
        if parent is None:
            raise ConfigError("standing keys need a directory in memory: name one in client.toml (state = ...)")
        if config.keys_on_disk:
            _log.warning(KEYS_ON_DISK)
        own = digest("d2pfed volatile", config.authority, config.client).hex()[:32]
        return KeyFile(config, VolatileFile(parent / own, epoch.hex(), keys_on_disk=config.keys_on_disk))

    def load(self) -> tuple[bytes, bytes]:
        """Return the epoch's invitation and what was kept; without it nothing is repaired."""
        data = self.file.read(self._holds)
        if data is None:
            if self.file.refusal:
                _log.warning("standing keys were erased: %s", self.file.refusal)
            raise PeerError("this silo has no standing keys of this epoch: it needs a new one")
        return split(data)

    def write(self, invitation: bytes, saved: bytes) -> None:
        """Keep what belongs to an epoch."""
        self.file.write(join(invitation, saved), self._head())

    def update(self, change: Callable[[bytes], tuple[bytes, _T]]) -> _T:
        """Change what was kept, under its lock; the new value is in its place when this returns."""
        return self.file.update(self._holds, change, self._head)

    def keep_only(self, run: str) -> None:
        """Erase the keys of earlier epochs of a run, and whatever does not fit this start and this log."""
        self.file.sweep(self._holds, lambda data: decode_standing_invitation(split(data)[0]).run == run)

    # Both look at the log when they are called, which is under the file's lock.

    def _holds(self, head: Head) -> bool:
        return self.config.log.read().holds(head)

    def _head(self) -> Head:
        return self.config.log.read().head


@dataclass(frozen=True, slots=True)
class KeyStore:
    """The state of an epoch, as a step sees it."""

    keys: KeyFile
    epoch: Epoch
    client: int

    def read(self) -> StandingState | None:
        """Return the state; a set-up that did not end has none."""
        _, saved = self.keys.load()
        if not is_state(saved):
            return None
        return StandingState.decode(self.epoch, self.client, saved)

    def advance(self, move: Callable[[StandingState], tuple[StandingState, _T]]) -> _T:
        """Replace the state by the one that `move` makes of it, on the disk when this returns."""

        def change(data: bytes) -> tuple[bytes, _T]:
            invitation, saved = split(data)
            state, result = move(StandingState.decode(self.epoch, self.client, saved))
            return join(invitation, state.encode()), result

        return self.keys.update(change)


def is_state(saved: bytes) -> bool:
    """Say whether what was kept are the keys of an epoch, not a set-up under way."""
    return bool(saved) and kind_of(saved) == MessageKind.SAVED_STANDING


def join(invitation: bytes, saved: bytes) -> bytes:
    """Return the bytes of an invitation and what is kept with it."""
    return pack_integer(len(invitation), 4) + invitation + saved


def split(data: bytes) -> tuple[bytes, bytes]:
    """Return an invitation and what was kept with it."""
    reader = Reader(memoryview(data))
    return reader.take(reader.integer(4)), reader.rest()
