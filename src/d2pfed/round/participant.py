"""The client half of a round: from an update to the ring vector that is masked and sent."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.clipping import split_clip
from d2pfed.noise.codec import require_update
from d2pfed.noise.mechanisms import Share
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan
from d2pfed.round.records import Batch, Units
from d2pfed.round.session import AttemptBinding, rotation_seed
from d2pfed.secagg import Client, Enrolment, History, Session
from d2pfed.secagg.crypto import Agree
from d2pfed.secagg.crypto import agree as compute_secret

Update = NDArray[np.floating] | Units  # a client's vector, or what a silo makes of its records

Train = Callable[[bytes, bytes], Update]  # from the bytes of task and model to a client's update


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """The client half: what one client brings to an attempt.

    Attributes:
        plan: what client and server have agreed on.
        client: the client's identity.
        entropy: the root of its randomness in this attempt.
        participations: how many contributions it has made before.
    """

    plan: Plan
    client: int
    entropy: Entropy
    participations: int

    def encode(
        self,
        session: AttemptBinding,
        update: Update,
        group: bytes | None,
        clip: float | None = None,
    ) -> RingVector:
        """Turn an update into the ring vector that is masked and sent: the only encoder there is.

        At its cap a client sends zero and its noise: staying away would tell that it was chosen, and would bias the
        sampling that the guarantee rests on. `clip` is that of the round, where the plan's clip adapts. Where the unit
        is a record, the update is the silo's records, of which a batch is drawn here.
        """
        if isinstance(update, Units):
            require_clip(self.plan, clip)
            batch = self.batch(session, update.count)
            for gradients in update.gradients(batch.chosen):
                batch.add(gradients)
            return batch.encode()
        if self.plan.batches is not None:
            raise ConfigError("a plan with the unit record takes a silo's records, got a single vector")
        own = update if self.participations < self.plan.max_participations else np.zeros_like(update)
        share = Share(
            rank=session.rank(self.client),
            holders=len(session.cohort),
            group=None if group is None else Entropy(group, self.entropy.is_replayed),
        )
        fresh = self._fresh(session)
        # A bit or a weight may be small beside the grid, so its vector is dithered.
        extended = self.plan.adaptive_clip is not None or self.plan.weighting is not None
        dither = None if not extended else fresh.child("dither").stream()
        centres = self.plan.codec.prepare(self._vector(own, clip), rotation_seed(session), dither)
        return self.plan.ring.wrap(self.plan.mechanism.encode(centres, share, fresh))

    def batch(self, session: AttemptBinding, count: int) -> Batch:
        """Return this attempt's batch of a silo that holds so many units, drawn by fresh coins."""
        fresh = self._fresh(session)
        is_silent = self.participations >= self.plan.max_participations
        return Batch.draw(self.plan, rotation_seed(session), 0 if is_silent else count, fresh)

    def _fresh(self, session: AttemptBinding) -> Entropy:
        """Return the randomness of this attempt alone."""
        return self.entropy.child("contribution", session.digest, self.client)

    def _vector(self, update: NDArray[np.floating], clip: float | None) -> NDArray[np.floating]:
        """Return the vector that is rotated: the update, or the update in units of the clip and its bit or weight."""
        require_clip(self.plan, clip)
        if self.plan.weighting is not None:
            require_update(update, self.plan.dimension + 1)  # its weight is the last number
            return self.plan.weighting.vector(update)
        require_update(update, self.plan.dimension)
        adaptive = self.plan.adaptive_clip
        return update if adaptive is None or clip is None else adaptive.vector(update, clip)

    def join(
        self,
        session: Session,
        train: Train,
        enrolment: Enrolment | None = None,
        history: History | None = None,
        agree: Agree = compute_secret,
    ) -> Client:
        """Return the machine that answers the server's requests in this attempt; `agree` is for simulations."""

        def contribute(task: bytes, model: bytes, group: bytes | None) -> RingVector:
            clip, rest = split_clip(self.plan.adaptive_clip, task)
            return self.encode(session, train(rest, model), group, clip)

        return Client(
            session,
            self.client,
            contribute,
            self.entropy,
            enrolment,
            history,
            agree,
        )


def require_clip(plan: Plan, clip: float | None) -> None:
    """Refuse a round without its clip where the plan's adapts, one out of its limits, and one where it is fixed."""
    if plan.adaptive_clip is None:
        if clip is not None:
            raise ConfigError(f"the plan's clip is fixed, so a round has none of its own, got {clip:g}")
    elif clip is None:
        raise PeerError("the plan's clip adapts (clip=auto), and this round came without its clip")
    else:
        plan.adaptive_clip.require(clip)


def require_fixed_clip(plan: Plan, what: str) -> None:
    """Refuse a plan with an adaptive clip where no clip travels with the model."""
    if plan.adaptive_clip is not None:
        raise ConfigError(
            f"{what} takes a fixed clip only, and the plan's adapts (clip=auto): give it as a number"
        )
