"""What one party remembers of others' logs: the latest position that each has shown, in a file of its own."""

from collections.abc import Mapping
from pathlib import Path

from d2pfed.ledger.files import append_file, locked, read_file, replace_file, truncate_file
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.roster import POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.wire import ClientId, pack_integer

_ID_BYTES, _KEY_BYTES = 8, 8
_RECORD_BYTES = _ID_BYTES + _KEY_BYTES + POSITION_BYTES
_SPARE_RECORDS = 1 << 10  # that the file may hold beside the latest ones before it is written anew


class Positions:
    """An append-only file of positions out of signed adverts; of each client the highest count counts.

    A position's own signature is checked by the client that it is shown to, and by the authority before it is a floor.

    `keys` are the clients' public keys of today: what somebody showed under another key is of no use any more.

    Guarantee: once kept, a position is forgotten only for a higher one of the same client, whatever crashes: a server
    that ends an attempt early, or a client that shows an older one, washes nothing away.
    Checked: test_flower_positions.py.
    """

    def __init__(self, file: Path, keys: Mapping[ClientId, bytes]) -> None:
        self._file = file
        self._keys = keys

    def latest(self) -> dict[ClientId, Position]:
        """Return the latest position of each client."""
        return self._latest(read_file(self._file) or b"")

    def keep(self, shown: Mapping[ClientId, Position]) -> None:
        """Keep the positions that are later than the ones before, on the disk when this returns."""
        with locked(self._file.with_name(f"{self._file.name}.lock")):
            data = read_file(self._file)
            if data is None:
                replace_file(self._file, data := b"")
            known = self._latest(data)
            later = {
                client: position
                for client, position in shown.items()
                if client not in known or position.count > known[client].count
            }
            if len(data) > (2 * len(known) + _SPARE_RECORDS) * _RECORD_BYTES:
                replace_file(self._file, self._pack(known | later))
            elif later:
                if torn := len(data) % _RECORD_BYTES:  # a crash cut the last one short
                    truncate_file(self._file, len(data) - torn)
                append_file(self._file, self._pack(later))

    def _pack(self, positions: Mapping[ClientId, Position]) -> bytes:
        return b"".join(
            pack_integer(client, _ID_BYTES) + _tag(self._keys[client]) + position.pack()
            for client, position in positions.items()
        )

    def _latest(self, data: bytes) -> dict[ClientId, Position]:
        latest: dict[ClientId, Position] = {}
        tags = {client: _tag(key) for client, key in self._keys.items()}
        for start in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
            record = data[start : start + _RECORD_BYTES]
            client = int.from_bytes(record[:_ID_BYTES], "little")
            if tags.get(client) != record[_ID_BYTES : _ID_BYTES + _KEY_BYTES]:
                continue
            position = unpack_position(record[_ID_BYTES + _KEY_BYTES :])
            if client not in latest or position.count > latest[client].count:
                latest[client] = position
        return latest


def _tag(key: bytes) -> bytes:
    return digest("d2pfed position key", key)[:_KEY_BYTES]
