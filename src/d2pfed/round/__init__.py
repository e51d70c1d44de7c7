"""One private round, client half and server half, whatever carries the bytes."""

from d2pfed.round.aggregation import (
    Attempts,
    Collected,
    InProcess,
    Invite,
    LatticeSum,
    MaskedSum,
    OpenSum,
    Outcome,
    aggregate,
    gather,
    run_plan,
)
from d2pfed.round.invitation import accept_invitation, accept_standing_invitation, enrolled_in, invited_run
from d2pfed.round.lattice import LatticeClient
from d2pfed.round.local_sum import Fidelity, local_sum, require_fidelity
from d2pfed.round.participant import Batch, Batches, Participant, Units, require_clip, require_fixed_clip
from d2pfed.round.session import (
    Attempt,
    AttemptBinding,
    AttemptSession,
    delivery_of,
    rotation_seed,
    session_of,
    sketch_of,
)
from d2pfed.round.standing import StandingMemory, StandingRun, StandingSteps, can_stand, epoch_of

__all__ = [
    "Batch",
    "Batches",
    "Participant",
    "Units",
    "accept_invitation",
    "accept_standing_invitation",
    "StandingMemory",
    "StandingSteps",
    "enrolled_in",
    "invited_run",
    "require_clip",
    "require_fixed_clip",
    "Attempts",
    "Collected",
    "InProcess",
    "Invite",
    "LatticeClient",
    "LatticeSum",
    "MaskedSum",
    "OpenSum",
    "Outcome",
    "StandingRun",
    "aggregate",
    "can_stand",
    "gather",
    "run_plan",
    "Fidelity",
    "local_sum",
    "require_fidelity",
    "Attempt",
    "AttemptBinding",
    "AttemptSession",
    "delivery_of",
    "epoch_of",
    "rotation_seed",
    "session_of",
    "sketch_of",
]
