"""All that a silo insists on before it answers a message of standing keys.

Tests show what each rule prevents: with that one rule patched away, the attack that it meets succeeds.
"""

from collections.abc import Collection, Mapping

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.secagg import crypto
from d2pfed.secagg.position import Position
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.standing.epoch import MOST_SKIPPED, Epoch, StandingAdvert, StandingStep
from d2pfed.secagg.standing.messages import StandingInvitation
from d2pfed.secagg.wire import ClientId, Subset


def require_epoch_recomputed(epoch: Epoch, client: ClientId, serial: int, invited: StandingInvitation) -> None:
    """Refuse an invitation to another epoch than the one that follows from this silo's own plan and roster."""
    named = (invited.run, invited.epoch, invited.first, invited.silos)
    agreed = (epoch.run, epoch.epoch, epoch.first, epoch.cohort)
    if invited.binding != epoch.digest or named != agreed or (invited.client, invited.serial) != (client, serial):
        raise PeerError("an invitation must be to the epoch that follows from this silo's plan and roster")


def require_first_is_new(first: int, charged: Collection[int]) -> None:
    """Refuse an epoch that begins at or before a step that was charged: it would be answered under the same row."""
    if charged and first <= max(charged):
        raise PeerError(f"an epoch must begin after step {max(charged)}, which was charged, got {first}")


def require_own_advert(adverts: Mapping[int, StandingAdvert], rank: int, own: StandingAdvert) -> None:
    """Refuse adverts without this silo's own, as it was sent."""
    if adverts.get(rank) != own:
        raise PeerError("a silo's own advert must come back unchanged")


def require_adverts_signed(epoch: Epoch, roster: Roster, adverts: Mapping[int, StandingAdvert]) -> None:
    """Refuse keys that their enrolled owner did not sign for this epoch: they could be the server's own."""
    for rank, advert in adverts.items():
        client = epoch.cohort[rank]
        crypto.require_signature(roster.key(client), advert.signature, advert.statement(epoch, client))


def require_distinct(adverts: Mapping[int, StandingAdvert]) -> None:
    """Refuse one key under two names."""
    publics = [advert.public for advert in adverts.values()]
    if len(set(publics)) != len(publics):
        raise PeerError("all public keys of an epoch must be distinct")


def require_no_low_order(public: bytes) -> None:
    """Refuse a key of low order: everyone would know the secret that is agreed on with it."""
    crypto.require_order(public)


def require_joined_quorum(epoch: Epoch, joined: Collection[int]) -> None:
    """Refuse an epoch in which too few have joined."""
    if len(joined) < epoch.quorum:
        raise PeerError(f"at least {epoch.quorum} silos must join, got {len(joined)}")


def not_later(
    epoch: Epoch, rank: int, adverts: Mapping[int, StandingAdvert], known: Mapping[ClientId, Position]
) -> dict[int, Position]:
    """Return the remembered positions of peers that show one that is not later: they were rolled back or cloned."""
    return {
        other: known[client]
        for other, advert in adverts.items()
        if other != rank
        and (client := epoch.cohort[other]) in known
        and advert.position.count <= known[client].count
    }


def require_later_position(client: ClientId, position: Position, remembered: Position | None) -> None:
    """Refuse a silo that shows no later position than before: no peer that has met it becomes ready beside it."""
    if remembered is not None and position.count <= remembered.count:
        raise PeerError(
            f"client {client} is left out: it shows row {position.count} of its log and was met at row "
            f"{remembered.count}, so it was restored from an older state, or has a twin"
        )


def require_current_claim(client: ClientId, claim: Position, advert: StandingAdvert | None) -> None:
    """Refuse a claim that a silo was met at an earlier row than it shows, or that did not come: it proves nothing."""
    if advert is None or claim.count < advert.position.count:
        raise PeerError(
            f"a claim about client {client} must be of a row that it does not go beyond, got {claim.count}"
        )


def require_member(step: StandingStep, rank: int) -> None:
    """Refuse a step without this silo."""
    if not step.members[rank]:
        raise PeerError("the silo itself is not a member of the step")


def require_members_joined(members: Subset, joined: Subset) -> None:
    """Refuse members without keys: no mask is shared with them, so they pad a quorum and hide nobody."""
    if bool((members & ~joined).any()):
        raise PeerError("a step has members that did not join its epoch")


def require_quorum(step: StandingStep) -> None:
    """Refuse too few members: their sum would carry less noise than was promised."""
    count = int(np.count_nonzero(step.members))
    if count < step.epoch.quorum:
        raise PeerError(f"a step must have at least {step.epoch.quorum} members, got {count}")


def require_planned_step(step: StandingStep) -> None:
    """Refuse a round or an attempt that the plan does not have."""
    if step.round >= step.epoch.rounds or step.attempt >= step.epoch.attempts:
        raise PeerError(
            f"a plan of {step.epoch.rounds} rounds with {step.epoch.attempts} attempts each has no round "
            f"{step.round}, attempt {step.attempt}"
        )


def require_step_forward(following: int, number: int) -> None:
    """Refuse a step that the keys have passed, `following` being the next: it was answered, or skipped for good."""
    if number < following:
        raise PeerError(f"step {number} is over: this silo's keys are at step {following}")
    if number - following > MOST_SKIPPED:
        raise PeerError(f"at most {MOST_SKIPPED} steps may be skipped, got {number - following}")


def require_charge_once(charged: Collection[int], number: int) -> None:
    """Refuse a step that has a row in this silo's ledger: it is never computed again."""
    if number in charged:
        raise PeerError(f"step {number} was charged before")
