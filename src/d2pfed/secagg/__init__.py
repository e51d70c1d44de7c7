"""Secure aggregation: a server learns the sum of its clients' vectors and nothing else about them.

The classes here are those of the main protocol (`pairwise`); those of silos with standing keys are in `standing`, those
of clients that speak once in `lattice`.
"""

from d2pfed.secagg import lattice, standing
from d2pfed.secagg.pairwise.client import Client
from d2pfed.secagg.pairwise.messages import Invitation, decode_invitation, upload_bytes
from d2pfed.secagg.pairwise.phases import Contribute, group_seed_of
from d2pfed.secagg.pairwise.server import Advertising, Sum, require_enough
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import (
    Enrolment,
    History,
    Position,
    Roster,
    decode_roster,
    encode_roster,
    issue_roster,
)
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import Exchange, ServerPhase, collect
