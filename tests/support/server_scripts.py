"""What a server does with a plan: announcements, attempts and steps in any order, among them ones to be refused."""

from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from d2pfed.accounting import Sampling
from d2pfed.deploy.client import Purpose
from d2pfed.deploy.layout import Layout, encode_task
from d2pfed.errors import D2PFedError
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Stream
from d2pfed.plan import Plan, Protocol
from d2pfed.secagg import standing
from d2pfed.secagg.wire import MessageKind, subset_of
from d2pfed.statistics.questions import MEANS, STATISTIC
from support.attacks import Attack
from support.lying_plans import LARGEST, Case, among

TASKS = {"training": {}, "statistics": {STATISTIC: "sum"}, "evaluation": {MEANS: "{}"}}
LOSSES = (MessageKind.INVITATION, MessageKind.KEY_ADVERTISEMENTS, MessageKind.MASK_REQUEST)

MOST_STEPS = 6

Place = tuple[int, int, int, int]  # round, attempt, draw and block


@dataclass
class Script:
    """What the server does with a plan: the same in both lives of the victim, as far as their answers are the same."""

    case: Case
    attack: Attack
    stream: Stream
    served: set[tuple[str, str]] = field(default_factory=set)

    @property
    def plan(self) -> Plan:
        return self.attack.plan

    def run(self) -> bool:
        """Announce, then attack; whether the plan was accepted."""
        places = self._places()
        if self.stream.below(10) == 0:
            wrong = Layout.of({"params": np.zeros(self.attack.layout.dimension + 1, np.float32)})
            self._announce(layout=wrong.encode())
        if not self._announce():
            return False
        if self.stream.below(10) == 0:
            other = replace(self.plan, epsilon=self.plan.epsilon * 2)
            self._announce(plan=canonical.encode(other))
            self._announce(first_draw=self.attack.first_draw + 1)
        if self.case.protocol is Protocol.PAIRWISE:
            self._pairwise(places)
        else:
            self._standing()
        if self.stream.below(4) == 0:
            self._replay()
        return True

    def _replay(self) -> None:
        """Frames that the victim had before, in another order."""
        frames = self.attack.life.frames
        for _ in range(3):
            with suppress(D2PFedError):
                if frames:
                    self.attack.life.receive(frames[self.stream.below(len(frames))])

    def _announce(self, **changes: object) -> bool:
        announcement = self.attack.announcement(self.case.text, **changes)
        for life in (self.attack.witness, self.attack.life):
            try:
                if life is not None:
                    life.announce(announcement)
            except D2PFedError:
                if life is self.attack.life:
                    return False
        return True

    def _steps(self) -> list[tuple[int, int]]:
        """Rounds and attempts that the plan has, the first ones."""
        return [divmod(step, self.plan.attempts_per_round) for step in range(MOST_STEPS)][
            : self.plan.rounds * self.plan.attempts_per_round
        ]

    # ---- the pairwise protocol

    def _places(self) -> list[Place]:
        """Attempts that the plan has, the worst draw first; this settles the run's first draw."""
        plan, attack, steps = self.plan, self.attack, self._steps()
        if self.case.group.roster.depth is None:
            return [(*step, 0, 0) for step in steps]
        with suppress(D2PFedError):
            draws = self.case.group.worst_draws(plan.sampling, attack.colluders)
            if not draws:
                return []
            attack.first_draw, block = draws[0]
            if plan.sampling.method is Sampling.ONCE:
                return [(*step, attack.first_draw, block) for step in steps]
            numbered = [(*step, attack.first_draw + place, 0) for place, step in enumerate(steps)]
            return [place for place in numbered if (place[2], 0) in draws]
        return []

    def _pairwise(self, places: list[Place]) -> None:
        if len(self.case.group.roster.clients) > LARGEST or self.stream.below(6) == 0:
            self._other_protocol()
        wanted = among(self.stream, 1, 1, 1, 2, self.plan.max_participations + 1)  # one more than its cap
        for place in places[: min(wanted, 3)]:
            if self.stream.below(3) == 0:
                self._flawed(place)
            elif self.stream.below(6) == 0:
                continue  # this attempt is left out
            self._attempt(*place)

    def _flawed(self, place: Place) -> None:
        """Something that the victim should refuse, or that does no harm."""
        number, attempt, draw, block = place
        match self.stream.below(9):
            case 0:
                self._attempt(number, attempt, draw + 1, block)
            case 1:
                self._attempt(number, attempt, draw, block + 1)
            case 2:
                self._attempt(self.plan.rounds, attempt, draw, block)
            case 3:
                self._attempt(number, self.plan.attempts_per_round, draw, block)
            case 4:
                self._attempt(*place)
                self._attempt(*place)  # repeated
            case 5 | 6:
                self._attempt(*place, few=True)
            case 7:
                self._other_protocol()
            case _:
                self._attempt(*place, flawed_task=True)

    def _attempt(
        self, number: int, attempt: int, draw: int, block: int, *, few: bool = False, flawed_task: bool = False
    ) -> None:
        attack = self.attack
        request, task, purpose = self._task(flawed=flawed_task)
        gone, survivors_only = LOSSES[self.stream.below(3)], bool(self.stream.below(2))
        before = attack.life.vectors
        with suppress(D2PFedError, IndexError):  # no such draw
            session = attack.session(number, attempt, draw, block)
            if few:
                attack.too_few(session, task, purpose, survivors_only=survivors_only)
            else:
                attack.pairwise(session, task, purpose, gone)
        if attack.life.vectors > before:
            self.served.add(("pairwise", request))

    def _task(self, *, flawed: bool) -> tuple[str, bytes, Purpose]:
        requests = list(self.case.settings["requests"]) if self.stream.below(8) else list(TASKS)
        request = requests[self.stream.below(len(requests))]
        purpose = Purpose.EVALUATION if request == "evaluation" else Purpose.TRAINING
        layout = self.attack.layout
        if flawed and self.stream.below(2):
            purpose = next(each for each in Purpose if each is not purpose)
        elif flawed:
            layout = Layout.of({"other": np.zeros(layout.dimension, np.float32)})
        return request, encode_task(layout, TASKS[request]), purpose

    # ---- standing keys

    def _standing(self) -> None:
        plan = self.plan
        least = max(plan.quorum, int(str(self.case.settings["least_cohort"])))
        size = among(self.stream, least, least, plan.quorum, plan.cohort_size)
        if self.stream.below(8) == 0:
            self._other_protocol()
        wanted, done, epochs = among(self.stream, 1, 1, 1, 2, plan.max_participations + 1), 0, 0
        current = None
        for number, attempt in self._steps():
            if self.stream.below(5) == 0:
                continue
            if current is None or self.stream.below(6) == 0:
                first = number * plan.attempts_per_round + attempt
                back = min(first, among(self.stream, 0, 0, 0, 1))  # a step that may have a row
                current = self._epoch(size, epochs, first - back) or self._epoch(size, epochs + 1, first)
                epochs += 2
            if current is None:
                return
            if self.stream.below(4) == 0:
                self._flawed_step(current, number, attempt)
            self._step(current, number, attempt, plan.quorum)
            done += 1
            if done == wanted:
                return

    def _epoch(self, size: int, number: int, first: int) -> standing.ReadyEpoch | None:
        with suppress(D2PFedError):
            return self.attack.set_up(self.attack.epoch(self.attack.worst(size), number, first))
        return None

    def _flawed_step(self, current: standing.ReadyEpoch, number: int, attempt: int) -> None:
        plan = self.plan
        match self.stream.below(6):
            case 0:
                self._step(current, number, attempt, plan.quorum - 1)
            case 1:
                self._step(current, plan.rounds, attempt, plan.quorum)
            case 2:
                self._step(current, number, plan.attempts_per_round, plan.quorum)
            case 3:
                self._step(current, 0, 0, plan.quorum)
            case 4:
                self._step(current, number, attempt, plan.quorum, flawed_task=True)
            case _:
                self._other_protocol()

    def _step(
        self, current: standing.ReadyEpoch, number: int, attempt: int, size: int, *, flawed_task: bool = False
    ) -> None:
        attack, epoch = self.attack, current.epoch
        request, task, purpose = self._task(flawed=flawed_task)
        worst = self._by_worth(epoch.cohort)[:size]
        members = subset_of(len(epoch.cohort), map(epoch.rank, worst))
        before = attack.life.vectors
        with suppress(D2PFedError):
            attack.step(current, standing.Step(epoch, number, attempt, members), task, purpose)
        if attack.life.vectors > before:
            self.served.add(("standing", request))

    def _by_worth(self, cohort: tuple[int, ...]) -> list[int]:
        """The victim, then those that help the server most."""
        group, bribed = self.case.group, self.attack.colluders
        return sorted(cohort, key=lambda client: (client != group.victim, client not in bribed))

    def _other_protocol(self) -> None:
        """The same run by the other protocol, in which nothing is drawn, or everyone is asked."""
        plan, attack = self.plan, self.attack
        if self.case.protocol is Protocol.STANDING:
            draw = attack.first_draw
            self._attempt(plan.rounds - 1, plan.attempts_per_round - 1, draw, 0)
            return
        with suppress(D2PFedError):
            current = attack.set_up(attack.epoch(attack.worst(plan.quorum), 0, 0))
            self._step(current, 0, 0, plan.quorum)
