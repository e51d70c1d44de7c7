"""One private round, client half and server half, whatever carries the bytes."""

from d2pfed.round.aggregation import (
    Attempts,
    Collected,
    InProcess,
    Invite,
    OpenSum,
    Outcome,
    aggregate,
    gather,
    run_plan,
)
from d2pfed.round.local_sums import Fidelity, local_sum, require_fidelity
from d2pfed.round.participant import (
    Batch,
    Batches,
    LatticeClient,
    Participant,
    Units,
    require_clip,
)
from d2pfed.round.session import (
    Attempt,
    AttemptBinding,
    AttemptSession,
    accept_invitation,
    accept_standing_invitation,
    delivery_of,
    enrolled_in,
    epoch_of,
    invited_run,
    rotation_seed,
    session_of,
    sketch_of,
)
from d2pfed.round.standing import StandingMemory, StandingRun, StandingSteps, can_stand
