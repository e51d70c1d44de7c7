"""One private round, client half and server half, whatever carries the bytes."""

from d2pfed.round.aggregation import Attempts, Outcome, aggregate, run_plan
from d2pfed.round.gathering import Collected, InProcess, Invite, MaskedSum, OpenSum, gather
from d2pfed.round.invited import accept, enrolled_in, invited_session
from d2pfed.round.local_sum import Fidelity, local_sum
from d2pfed.round.participant import Participant, require_clip, require_fixed_clip
from d2pfed.round.records import Batch, Batches, Units
from d2pfed.round.session import Attempt, AttemptBinding, rotation_seed, session_of, sketch_of
from d2pfed.round.standing import AskPresence, StandingAttempts, StandingRun
from d2pfed.round.standing_silo import (
    StandingMemory,
    StandingSteps,
    can_stand,
    epoch_of,
    invited_epoch,
)

__all__ = [
    "AskPresence",
    "Attempt",
    "AttemptBinding",
    "Attempts",
    "Batch",
    "Batches",
    "Collected",
    "Fidelity",
    "InProcess",
    "Invite",
    "MaskedSum",
    "OpenSum",
    "Outcome",
    "Participant",
    "StandingAttempts",
    "StandingMemory",
    "StandingRun",
    "StandingSteps",
    "Units",
    "accept",
    "aggregate",
    "can_stand",
    "enrolled_in",
    "epoch_of",
    "gather",
    "local_sum",
    "invited_epoch",
    "invited_session",
    "require_clip",
    "require_fixed_clip",
    "rotation_seed",
    "run_plan",
    "session_of",
    "sketch_of",
]
