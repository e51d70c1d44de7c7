"""Secure aggregation: a server learns the sum of its clients' vectors and nothing else about them."""

from d2pfed.secagg.exchange import Exchange, ServerPhase, collect
from d2pfed.secagg.pairwise.checks import Contribute
from d2pfed.secagg.pairwise.client import Client
from d2pfed.secagg.pairwise.graph import Consistency
from d2pfed.secagg.pairwise.messages import Invitation, decode_invitation, upload_bytes
from d2pfed.secagg.pairwise.phases import group_seed_of
from d2pfed.secagg.pairwise.server import (
    Advertising,
    Confirming,
    Masking,
    Sharing,
    Unmasking,
    require_enough,
    with_enough_holders,
)
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.pairwise.unmask import Sum
from d2pfed.secagg.position import History, Position
from d2pfed.secagg.roster import Enrolment, Roster, decode_roster, encode_roster, issue_roster
from d2pfed.secagg.standing.client import (
    StandingAdvertised,
    StandingReady,
    StandingSilo,
    StandingState,
    StandingStore,
    answer_step,
)
from d2pfed.secagg.standing.epoch import Epoch, StandingKeys, StandingStep
from d2pfed.secagg.standing.messages import StandingInvitation, decode_standing_invitation
from d2pfed.secagg.standing.server import StandingAdvertising, StandingAgreeing, StandingCollecting, StandingEpoch

__all__ = [
    "Session",
    "Delivery",
    "Consistency",
    "Client",
    "Contribute",
    "History",
    "Position",
    "Invitation",
    "decode_invitation",
    "Advertising",
    "Sharing",
    "Masking",
    "Confirming",
    "Unmasking",
    "Sum",
    "Exchange",
    "ServerPhase",
    "collect",
    "Roster",
    "Enrolment",
    "issue_roster",
    "encode_roster",
    "decode_roster",
    "with_enough_holders",
    "require_enough",
    "group_seed_of",
    "upload_bytes",
    "Epoch",
    "StandingKeys",
    "StandingStep",
    "StandingInvitation",
    "decode_standing_invitation",
    "StandingSilo",
    "StandingAdvertised",
    "StandingReady",
    "StandingState",
    "StandingStore",
    "answer_step",
    "StandingAdvertising",
    "StandingAgreeing",
    "StandingEpoch",
    "StandingCollecting",
]
