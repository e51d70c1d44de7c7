"""Standing keys: silos agree on pairwise keys once an epoch, and each step after that is one exchange."""

from d2pfed.secagg.standing.client import (
    Advertised,
    Agreed,
    Client,
    State,
    answer_step,
    require_charge_once,
    require_first_is_new,
)
from d2pfed.secagg.standing.epoch import Epoch, Keys, Step, decode_invitation
from d2pfed.secagg.standing.server import Advertising, Collecting, ReadyEpoch
