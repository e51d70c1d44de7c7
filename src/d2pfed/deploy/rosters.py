"""Rosters: which one a client goes by, how an authority makes the next one, a server's draws, clients' positions."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from d2pfed.deploy.config import ClientConfig, decode_public
from d2pfed.deploy.heads import PublishedHead, read_head
from d2pfed.errors import ConfigError, DamagedFile, PeerError
from d2pfed.ledger.client_log import ClientHistory, Entry
from d2pfed.ledger.files import (
    OTHERS_MAY_USE,
    FileError,
    append_file,
    create_file,
    locked,
    read_file,
    replace_file,
    truncate_file,
)
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import KEY_BYTES, Entropy, digest
from d2pfed.secagg import Enrolment, Roster, decode_roster, issue_roster
from d2pfed.secagg.draws import MOST_DEPTH, DrawTree
from d2pfed.secagg.heads import Head as RosterHead
from d2pfed.secagg.heads import SlotEnrolment, decode_head, decode_slip
from d2pfed.secagg.roster import (
    NO_ROOT,
    POSITION_BYTES,
    Position,
    not_before,
    require_serial,
    require_unexpired,
    unpack_position,
    verify_position,
)
from d2pfed.secagg.wire import ClientId, pack_integer

_log = logging.getLogger("d2pfed.deploy")

DEPTH = 12  # 4,096 draws for all runs under one roster

_FILE, _HEAD_FILE = "roster", "roster-head"  # in a client's directory
_ID_BYTES, _KEY_BYTES = 8, 8  # of a position's record
_RECORD_BYTES = _ID_BYTES + _KEY_BYTES + POSITION_BYTES
_SPARE_RECORDS = 1 << 10  # that a file of positions may hold beside the latest ones before it is written again

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """A roster and its bytes as the authority has signed them; its head and certificates, if they were published.

    The bytes, or the head and a slip for each, travel to the clients.
    """

    roster: Roster
    data: bytes
    published: PublishedHead | None = None


def read_roster(file: Path, authority: str) -> SignedRoster:
    """Return the roster in a file, if this authority (its public key in hexadecimal) has signed it."""
    data = file.read_bytes()
    roster = decode_roster(data, decode_public(authority))
    return SignedRoster(roster, data, read_head(file, roster))


def accept_roster(config: ClientConfig, data: bytes, clock: Clock = time.time) -> tuple[Enrolment, ClientHistory]:
    """Return the enrolment under a roster, from any sender, if this client may go by it; the log knows it then.

    Guarantee: never an older roster than one before, never two of one serial, never an expired one, never one whose
    authority knows of a later position than this log holds. Checked: test_flower_rosters.py.
    """
    roster = decode_roster(data, config.authority)
    roster.key(config.client)
    enrolment = Enrolment(secret_of(config), roster)
    history = log_issued(config, roster, enrolment, Head(*roster.floors[config.client]), clock)
    file = config.directory / _FILE
    if read_file(file) != data:
        replace_file(file, data)
    return enrolment, history


def accept_head(
    config: ClientConfig, data: bytes, slip: bytes, clock: Clock = time.time
) -> tuple[SlotEnrolment, ClientHistory]:
    """Return the enrolment under a roster's head and this client's slip, if it may go by them; the log knows it then.

    Guarantee: that of `accept_roster`, without the roster. Checked: test_flower_heads.py.
    """
    head = decode_head(data, config.authority)
    own, floor = decode_slip(slip, head, config.client)
    enrolment = SlotEnrolment(secret_of(config), own)
    history = log_issued(config, head, enrolment, Head(*floor), clock)
    file, kept = config.directory / _HEAD_FILE, pack_integer(len(data), 4) + data + slip
    if read_file(file) != kept:
        replace_file(file, kept)
    return enrolment, history


def current_head(config: ClientConfig, clock: Clock = time.time) -> tuple[SlotEnrolment, ClientHistory]:
    """Return the enrolment under the head and the slip that this client has."""
    head, slip = read_own_head(config)
    if not head:
        raise FileError(f"there is no head of a roster in {config.directory}: it comes with a run's announcement")
    return accept_head(config, head, slip, clock)


def read_own_head(config: ClientConfig) -> tuple[bytes, bytes]:
    """Return the head and the slip in a client's directory, still to be checked; no bytes where there are none."""
    kept = read_file(config.directory / _HEAD_FILE) or bytes(4)
    size = 4 + int.from_bytes(kept[:4], "little")
    return kept[4:size], kept[size:]


def secret_of(config: ClientConfig) -> bytes:
    """Return the private signing key of an enrolled client."""
    if config.secret is None:
        raise ConfigError("this client is not enrolled: its settings assume that the server keeps to the protocol")
    return config.secret


def log_issued(
    config: ClientConfig,
    issued: Roster | RosterHead,
    enrolment: Enrolment | SlotEnrolment,
    floor: Head,
    clock: Clock,
) -> ClientHistory:
    """Refuse a roster, or its head, that this client may not go by; return the log with a row of it."""
    while True:
        history = config.log.read()
        _require_acceptable(config, issued, history, floor, clock)
        enrolment.require_self(config.client)
        if issued.serial == history.serial:
            return history
        row = {"serial": issued.serial, "digest": issued.digest.hex(), "issued": issued.issued}
        added = config.log.append(history, Entry.ROSTER, row)
        if added is not None:
            return added


def _require_acceptable(
    config: ClientConfig, roster: Roster | RosterHead, history: ClientHistory, floor: Head, clock: Clock
) -> None:
    """Refuse a roster that is out of order, expired, or ahead of this client's log."""
    try:
        require_serial(roster, history.serial, bytes.fromhex(history.roster))
    except PeerError as error:
        _log.error("this roster is refused: %s", error)
        raise
    issued = [body["issued"] for body in history.bodies(Entry.ROSTER) if isinstance(body["issued"], int)]
    latest = max(
        roster.issued, history.latest_seconds(), *issued, 0
    )  # no clock can be before it by more than a day
    require_unexpired(roster, not_before(int(clock()), latest))
    if not history.holds(floor):  # the log was lost or cloned
        config.log.mark("in the authority's roster", floor)
        raise PeerError(f"the authority has seen position {floor.seq} of this client, which its log does not hold")


def current_roster(config: ClientConfig, clock: Clock = time.time) -> tuple[Enrolment, ClientHistory]:
    """Return the enrolment under the roster that this client has."""
    data = read_file(config.directory / _FILE)
    if data is None:
        raise FileError(
            f"there is no roster in {config.directory}: it comes with a run's announcement, or `d2pfed client enrol`"
        )
    return accept_roster(config, data, clock)


def read_own_issue(config: ClientConfig) -> Roster | RosterHead | None:
    """Return the latest roster or head in a client's directory, whether it is still good or not."""
    data, (head, _) = read_file(config.directory / _FILE), read_own_head(config)
    found: list[Roster | RosterHead] = [] if data is None else [decode_roster(data, config.authority)]
    if head:
        found.append(decode_head(head, config.authority))
    return max(found, key=lambda each: each.serial, default=None)


@dataclass(frozen=True, slots=True)
class DrawCommitment:
    """The server's commitment to its tree of draws, for the authority: binding, and it reveals no draw."""

    depth: int
    root: bytes

    def encode(self) -> str:
        """Return the text that the authority is given."""
        return f"{self.depth}:{self.root.hex()}"

    @staticmethod
    def decode(text: str) -> "DrawCommitment":
        """Read what the server has printed."""
        depth, _, root = text.partition(":")
        try:
            committed = DrawCommitment(int(depth[:4]), bytes.fromhex(root))
        except ValueError:
            committed = DrawCommitment(-1, b"")
        if not 0 <= committed.depth <= MOST_DEPTH or len(committed.root) != KEY_BYTES:
            raise ConfigError(
                f"draws are DEPTH:ROOT, a number and {2 * KEY_BYTES} hexadecimal digits, got {text[:80]!r}"
            )
        return committed


def make_draws(file: Path, depth: int = DEPTH) -> DrawCommitment:
    """Make a secret tree of draws in a file, and return what to tell the authority; never overwrites one."""
    if not 0 <= depth <= MOST_DEPTH:
        raise ConfigError(f"a tree of draws has a depth in [0, {MOST_DEPTH}], got {depth}")
    secret = Entropy.system().require_system()
    try:
        create_file(file, bytes([depth]) + secret.key)
    except FileExistsError:
        raise ConfigError(f"{file} holds draws already") from None
    tree = DrawTree(secret, depth)
    return DrawCommitment(tree.depth, tree.root)


class Draws:
    """A tree in its file, and beside it the record of what is used.

    Guarantee: a draw is noted as used, durably, before anyone is invited to it, and never serves two runs.
    Checked: test_flower_enrolment.py::test_no_draw_serves_two_runs.
    """

    def __init__(self, file: Path, roster: Roster) -> None:
        data = read_file(file, forbidden=OTHERS_MAY_USE)
        if data is None or len(data) != 1 + KEY_BYTES:
            raise ConfigError(f"{file} holds no draws; see `d2pfed roster draws`")
        self.tree = DrawTree(Entropy(data[1:], is_replayed=False), data[0])
        self._used = file.with_name(f"{file.name}.{self.tree.root.hex()[:16]}.used")  # the next tree begins again
        self._earlier = file.with_name(f"{file.name}.used")  # its name in earlier releases
        if (roster.depth, roster.root) != (self.tree.depth, self.tree.root):
            raise ConfigError(f"roster {roster.serial} was signed for draws other than those in {file}")

    def reserve(self, run: str, count: int) -> int:
        """Return the first of a run's own draws, the same again when the run is resumed."""
        with locked(self._used.with_name(f"{self._used.name}.lock")):
            data = read_file(self._used)
            used = _decode(read_file(self._earlier) if data is None else data)
            if run not in used:
                first = max((begin + size for begin, size in used.values()), default=0)
                if first + count > 1 << self.tree.depth:
                    raise ConfigError(
                        f"a run needs {count} draws, and {(1 << self.tree.depth) - first} are left under this roster: "
                        f"a new roster is needed"
                    )
                used[run] = first, count
                replace_file(self._used, json.dumps(used).encode())
        first, size = used[run]
        if size != count:
            raise ConfigError(f"run {run} has {size} draws, and now asks for {count}")
        return first


def _decode(data: bytes | None) -> dict[str, tuple[int, int]]:
    if data is None:
        return {}
    try:
        return {str(run): (int(first), int(count)) for run, (first, count) in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"the record of used draws is damaged: {error}") from None


@dataclass(frozen=True, slots=True)
class Positions:
    """What one party remembers of others' logs: an append-only file of positions out of signed adverts.

    A position's own signature is checked by the client that it is shown to, and by the authority before it is a floor.
    `keys` are the clients' public keys of today: what somebody showed under another key is of no use any more. A client
    that holds no roster (None) learns keys from certificates: the last key under which it has met somebody counts.

    Guarantee: once kept, a position is forgotten only for a higher one of the same client, whatever crashes: a server
    that ends an attempt early, or a client that shows an older one, erases nothing. Checked: test_flower_positions.py.
    """

    file: Path
    keys: Mapping[ClientId, bytes] | None

    def latest(self) -> dict[ClientId, Position]:
        """Return the latest position of each client."""
        return {client: position for client, (_, position) in self._latest(read_file(self.file) or b"").items()}

    def keep(self, shown: Mapping[ClientId, Position], keys: Mapping[ClientId, bytes] | None = None) -> None:
        """Keep the positions that are later than the ones before, on the disk when this returns.

        `keys` are those that certificates have shown, where there is no roster.
        """
        tags = {client: key_tag((keys or self.keys or {})[client]) for client in shown}
        with locked(self.file.with_name(f"{self.file.name}.lock")):
            data = read_file(self.file)
            if data is None:
                replace_file(self.file, data := b"")
            known = self._latest(data)
            later = {
                client: (tags[client], position)
                for client, position in shown.items()
                if client not in known
                or known[client][0] != tags[client]
                or position.count > known[client][1].count
            }
            if len(data) > (2 * len(known) + _SPARE_RECORDS) * _RECORD_BYTES:
                replace_file(self.file, self._pack(known | later))
            elif later:
                if torn := len(data) % _RECORD_BYTES:  # a crash cut the last one short
                    truncate_file(self.file, len(data) - torn)
                append_file(self.file, self._pack(later))

    def _pack(self, positions: Mapping[ClientId, tuple[bytes, Position]]) -> bytes:
        return b"".join(
            pack_integer(client, _ID_BYTES) + tag + position.pack()
            for client, (tag, position) in positions.items()
        )

    def _latest(self, data: bytes) -> dict[ClientId, tuple[bytes, Position]]:
        """Return the latest position of each client, and the tag of the key that it was shown under."""
        latest: dict[ClientId, tuple[bytes, Position]] = {}
        tags = None if self.keys is None else {client: key_tag(key) for client, key in self.keys.items()}
        for start in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
            record = data[start : start + _RECORD_BYTES]
            client = int.from_bytes(record[:_ID_BYTES], "little")
            tag = record[_ID_BYTES : _ID_BYTES + _KEY_BYTES]
            if tags is not None and tags.get(client) != tag:
                continue
            position = unpack_position(record[_ID_BYTES + _KEY_BYTES :])
            before = latest.get(client)
            if before is None or before[0] != tag or position.count > before[1].count:
                latest[client] = tag, position
        return latest


def key_tag(key: bytes) -> bytes:
    """Return what stands for a public key beside a position that was shown under it."""
    return digest("d2pfed position key", key)[:_KEY_BYTES]


def shown_positions(before: Roster | None, files: Iterable[Path]) -> dict[ClientId, Position]:
    """Return the latest position of each client, out of files that servers have kept, by the clients' signatures."""
    latest: dict[ClientId, Position] = {}
    for file in files:
        if before is None:
            raise ConfigError("--positions needs --previous, the roster that enrolled their clients")
        for client, position in Positions(file, before.keys).latest().items():
            try:
                verify_position(position, before.key(client), before.authority, client)
            except PeerError:
                continue
            if client not in latest or position.count > latest[client].count:
                latest[client] = position
    return latest


def next_roster(
    authority: bytes,
    before: Roster | None,
    *,
    added: Mapping[ClientId, bytes],
    removed: AbstractSet[ClientId],
    shown: Mapping[ClientId, Position],
    draws: DrawCommitment | None,
    most_depth: int,
    days: int,
    now: int,
    entropy: Entropy,
) -> Roster:
    """Return the roster after the one before; a client that comes again keeps its floor, with whatever key.

    Guarantee: serials and floors only rise, a tree of draws serves one roster, and the nonce is drawn after all of it
    is known. Checked: test_flower_enrolment.py.
    """
    keys = {} if before is None else dict(before.keys)
    floors = {} if before is None else dict(before.floors)
    if missing := sorted(removed - keys.keys()):
        raise ConfigError(f"client {missing[0]} cannot be removed: it is not enrolled")
    keys = {client: key for client, key in keys.items() if client not in removed} | dict(added)
    for client, position in shown.items():
        if client not in floors or position.count > floors[client][0]:
            floors[client] = position.count, position.head
    if draws is not None and before is not None and before.root == draws.root:
        raise ConfigError("a new roster needs new draws, got those of the previous roster")
    if draws is not None and draws.depth > most_depth:
        raise ConfigError(f"a tree of draws has a depth of at most {most_depth} unless --deep, got {draws.depth}")
    return issue_roster(
        keys,
        authority,
        serial=1 if before is None else before.serial + 1,
        issued=now,
        entropy=entropy,
        lifetime_days=days,
        floors={client: floor for client, floor in floors.items() if client in keys},
        depth=None if draws is None else draws.depth,
        root=NO_ROOT if draws is None else draws.root,
    )
