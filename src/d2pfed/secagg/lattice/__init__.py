"""One message per client: vectors behind learning with errors, opened by a committee."""

from d2pfed.secagg.lattice.checks import require_one_statement
from d2pfed.secagg.lattice.client import Contribute, Member, MemberAnswer, Participant, Record
from d2pfed.secagg.lattice.messages import decode_request
from d2pfed.secagg.lattice.server import Agreeing, Convening, Invitations, Opening, Tracing, Vouching
from d2pfed.secagg.lattice.session import Session, model_digest

__all__ = [
    "Agreeing",
    "Contribute",
    "Convening",
    "Invitations",
    "Member",
    "MemberAnswer",
    "Opening",
    "Participant",
    "Record",
    "Session",
    "Tracing",
    "Vouching",
    "decode_request",
    "model_digest",
    "require_one_statement",
]
