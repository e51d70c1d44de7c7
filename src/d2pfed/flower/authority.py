"""The authority's next roster: who is enrolled, with which key, from which position of its log on."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.draws import Committed
from d2pfed.flower.positions import Positions
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import Roster, issue_roster
from d2pfed.secagg.position import Position, verify_position
from d2pfed.secagg.roster import NO_ROOT, Floor
from d2pfed.secagg.wire import ClientId


def shown_positions(before: Roster | None, files: Iterable[Path]) -> dict[ClientId, Position]:
    """Return the latest position of each client of the roster before, out of files that servers have kept.

    Whoever brings a file, only a client's own signature counts.
    """
    latest: dict[ClientId, Position] = {}
    for file in files:
        if before is None:
            raise ConfigError("positions are those of clients of the roster before: --previous is needed")
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
    draws: Committed | None,
    most_depth: int,
    days: int,
    now: int,
    entropy: Entropy,
) -> Roster:
    """Return the roster after the one before; a client that comes again keeps its floor, with whatever key.

    Guarantee: serials and floors only rise, a tree of draws serves one roster, and the nonce is drawn after all of it
    is known. Checked: test_flower_authority.py.
    """
    keys = {} if before is None else dict(before.keys)
    if missing := sorted(removed - keys.keys()):
        raise ConfigError(f"client {missing[0]} cannot be removed: it is not enrolled")
    keys = {client: key for client, key in keys.items() if client not in removed} | dict(added)
    if draws is not None:
        require_own_tree(draws, before, most_depth)
    floors = {client: _floor(client, before, shown) for client in keys}
    return issue_roster(
        keys,
        authority,
        serial=1 if before is None else before.serial + 1,
        issued=now,
        entropy=entropy,
        lifetime_days=days,
        floors={client: floor for client, floor in floors.items() if floor is not None},
        depth=None if draws is None else draws.depth,
        root=NO_ROOT if draws is None else draws.root,
    )


def require_own_tree(draws: Committed, before: Roster | None, most_depth: int) -> None:
    """Refuse a tree that a roster had before, and one with more draws than a federation needs."""
    if before is not None and before.root == draws.root:
        raise ConfigError("a new roster needs new draws: the server has given those of the roster before")
    if draws.depth > most_depth:
        raise ConfigError(f"a tree of draws has a depth of at most {most_depth} unless --deep, got {draws.depth}")


def _floor(client: ClientId, before: Roster | None, shown: Mapping[ClientId, Position]) -> Floor | None:
    known = [] if before is None or client not in before.floors else [before.floors[client]]
    if client in shown:
        known.append((shown[client].count, shown[client].head))
    return max(known, key=lambda floor: floor[0], default=None)
