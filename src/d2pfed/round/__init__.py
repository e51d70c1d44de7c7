"""One private round, client half and server half, whatever carries the bytes."""

from d2pfed.round.aggregation import Attempts, Outcome, aggregate, run_plan
from d2pfed.round.gathering import Collected, Invite, MaskedSum, gather
from d2pfed.round.given import private_sum
from d2pfed.round.invited import accept, enrolled_in, invited_session
from d2pfed.round.participant import Participant, require_clip, require_fixed_clip
from d2pfed.round.session import Attempt, rotation_seed, session_of, sketch_of

__all__ = [
    "Attempt",
    "Attempts",
    "Collected",
    "Invite",
    "MaskedSum",
    "Outcome",
    "Participant",
    "accept",
    "aggregate",
    "enrolled_in",
    "gather",
    "invited_session",
    "private_sum",
    "require_clip",
    "require_fixed_clip",
    "rotation_seed",
    "run_plan",
    "session_of",
    "sketch_of",
]
