"""Secure aggregation: a server learns the sum of its clients' vectors and nothing else about them."""

from d2pfed.graph import Consistency
from d2pfed.secagg.client import Client
from d2pfed.secagg.exchange import Exchange, ServerPhase, collect
from d2pfed.secagg.messages import Invitation, decode_invitation, upload_bytes
from d2pfed.secagg.phases import Contribute, group_seed_of
from d2pfed.secagg.roster import Enrolment, Roster, decode_roster, encode_roster, issue_roster
from d2pfed.secagg.server import Advertising, Confirming, Masking, Sharing, Unmasking, carried, require_enough
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.unmask import Sum

__all__ = [
    "Session",
    "Delivery",
    "Consistency",
    "Client",
    "Contribute",
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
    "carried",
    "require_enough",
    "group_seed_of",
    "upload_bytes",
]
