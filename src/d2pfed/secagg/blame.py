"""Who must have cheated, from shares that were missing or wrong: each is a dispute between its owner and its holder."""

from collections import defaultdict
from collections.abc import Iterable


class Disputes:
    """Pairs of clients of which one has cheated: an owner whose share did not reach its holder, or was wrong there.

    A server that passes the boxes on cannot tell which. But an honest client is in dispute with cheats only, so who is
    in dispute with more others than there may be cheats is one itself.
    """

    def __init__(self, most_liars: int) -> None:
        self._most = most_liars
        self._others: defaultdict[int, set[int]] = defaultdict(set)

    def add(self, owner: int, holders: Iterable[int]) -> None:
        """Note whose share of an owner was missing or wrong."""
        for holder in holders:
            self._others[owner].add(holder)
            self._others[holder].add(owner)

    def certain(self) -> frozenset[int]:
        """Return who is to blame whoever else is."""
        return frozenset(client for client, others in self._others.items() if len(others) > self._most)

    def around(self, owner: int) -> frozenset[int]:
        """Return an owner and who is in dispute with it, if no certain cheat explains it: one of them must be one."""
        certain = self.certain()
        others = self._others.get(owner, set()) - certain
        return frozenset({owner, *others}) if others and owner not in certain else frozenset()
