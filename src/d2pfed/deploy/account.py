"""A client's own account: each vector counts, in whatever run, at the noise that its plan's guarantee rests on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from d2pfed.accounting import Release, Sampling, client_epsilon, round_up
from d2pfed.deploy.config import ClientBudget, ClientConfig
from d2pfed.errors import ConfigError, LedgerError, PeerError
from d2pfed.ledger import decode_release, encode_release
from d2pfed.ledger.client_log import ClientHistory, ClientLog, Entry
from d2pfed.plan import Plan

ALL = "all"  # a person's word that the budget is to count as spent
NOTHING = "nothing"
RUNS = "runs"

NOTHING_LEFT = "this client's cap or budget is reached: it takes no part"


@dataclass(frozen=True, slots=True)
class ClientSpending:
    """What a client has spent so far: its releases, and whether a person has declared the whole budget as spent."""

    releases: tuple[Release, ...]
    is_all_spent: bool

    @staticmethod
    def of(history: ClientHistory, app: str = "") -> "ClientSpending":
        """Return what a log says, declarations included: of all apps, or of one, whose share of those is not known."""
        rows = [body for body in history.bodies(Entry.CHARGE) if app in ("", body.get("app"))]
        charged = [decode_release(str(body["release"])) for body in rows]
        words = [*history.bodies(Entry.OPENING), *history.bodies(Entry.DECLARATION)]
        for listed in (body.get("runs", []) for body in words):
            if not isinstance(listed, list):
                raise LedgerError("the runs of a declaration must be a list")
            for run in listed:
                charged += [decode_release(str(run["release"]))] * int(run["times"])
        return ClientSpending(tuple(charged), any(body.get("carried") == ALL for body in words))

    def participations(self, run: str) -> int:
        """Return how many vectors count in a run, which is what its plan's cap is held against."""
        return sum(release.run == run for release in self.releases)

    def epsilon(self, delta: float, more: Sequence[Release] = ()) -> float:
        """Return what it costs against the server and the colluders of the plans, with this many more releases."""
        return math.inf if self.is_all_spent else client_epsilon([*self.releases, *more], delta)


@dataclass(frozen=True, slots=True)
class ClientAccount:
    """The budget and the log that it is charged to. All work is done outside of the log's lock.

    Guarantee: the budget holds for all apps together; an app with a limit of its own also keeps to that.
    Checked: test_flower_apps.py.
    """

    log: ClientLog
    budget: ClientBudget
    app: str = ""  # whose vectors are charged; empty where all are served alike
    limit: float = math.inf  # what that app may spend of the budget

    @staticmethod
    def of(config: ClientConfig) -> "ClientAccount":
        """Return the account that a client's vectors are charged to, of the app that answers."""
        limit = config.apps[config.app].epsilon if config.app else math.inf
        return ClientAccount(config.log, config.budget, config.app, limit)

    def _accounts(self, history: ClientHistory) -> list[tuple[str, ClientSpending, float]]:
        """Return what is spent and what may be: by this client, and by the app that answers, where it has a limit."""
        whole = [("its", ClientSpending.of(history), self.budget.epsilon)]
        if self.limit == math.inf:
            return whole
        return [*whole, (f"the app {self.app}'s", ClientSpending.of(history, self.app), self.limit)]

    def require_room(self, plan: Plan, run: str, history: ClientHistory) -> None:
        """Refuse a plan that may spend more than this client has left.

        Under `once` a client whose block was used accepts the run again: what it has begun is all it has to say.
        """
        if plan.sampling.method is not Sampling.ONCE:
            self.require_below_cap(plan, run, history)
        left = max(0, plan.max_participations - ClientSpending.of(history).participations(run))
        for whose, spending, limit in self._accounts(history):
            epsilon = spending.epsilon(self.budget.delta, [charged(plan, run, 0, 0)] * left)
            if epsilon > limit:
                raise ConfigError(
                    f"with the {left} more vectors that this plan allows, this client would spend epsilon "
                    f"{round_up(epsilon, 4)} against the server and {plan.colluders} colluders; {whose} budget is "
                    f"{limit:g}"
                )

    def require_below_cap(self, plan: Plan, run: str, history: ClientHistory) -> None:
        """Refuse a run whose cap is reached where nothing is sampled: there, a refusal reveals nothing."""
        sent = ClientSpending.of(history).participations(run)
        if plan.sampling.method is not Sampling.FIXED and sent >= plan.max_participations:
            raise ConfigError(
                f"this client has sent {sent} vectors in run {run}, its plan allows {plan.max_participations}"
            )

    def sent_before(self, plan: Plan, release: Release, history: ClientHistory) -> int | None:
        """Return how many vectors of a release's run were sent; None if the cap or the budget allows no further one."""
        sent = ClientSpending.of(history).participations(release.run)
        if sent >= plan.max_participations:
            return None
        accounts = self._accounts(history)
        has_room = all(spent.epsilon(self.budget.delta, [release]) <= limit for _, spent, limit in accounts)
        return sent if has_room else None

    def charge(
        self,
        plan: Plan,
        run: str,
        number: int,
        attempt: int,
        note: Mapping[str, object],
        *,
        require: Callable[[ClientHistory], None] = lambda _history: None,
    ) -> int:
        """Record one more vector before it is made, and return how many of this run were sent before.

        `require` checks the very log that the row is added to. At the cap of the run, or with the budget of all runs
        spent, a client that was sampled sends zero and its noise, which costs nothing: the answer is then the plan's
        cap. Elsewhere it refuses.
        Checked: test_flower_client_account.py::test_the_cap_counts_the_vectors_of_a_run.
        """
        release = charged(plan, run, number, attempt)
        while True:
            history = self.log.read()
            require(history)
            sent = self.sent_before(plan, release, history)
            if sent is None and plan.sampling.method is Sampling.FIXED:
                return plan.max_participations
            if sent is None:
                raise PeerError(NOTHING_LEFT)
            body = {"run": run, "release": encode_release(release), **note}
            if self.app:
                body["app"] = self.app
            if self.log.append(history, Entry.CHARGE, body) is not None:
                return sent


def carried_over(choice: str, runs: Mapping[str, Plan]) -> dict[str, object]:
    """Return what a declaration says is carried over: all of the budget, nothing, or whole runs by their plans."""
    if choice not in (ALL, NOTHING, RUNS) or (choice == RUNS) != bool(runs):
        raise ConfigError(f"{ALL}, {NOTHING}, or runs by name may be carried over, got {choice}, {len(runs)} runs")
    listed = [
        {"run": run, "release": encode_release(charged(plan, run, 0, 0)), "times": plan.max_participations}
        for run, plan in runs.items()
    ]
    return {"carried": choice, "runs": listed} if listed else {"carried": choice}


def charged(plan: Plan, run: str, number: int, attempt: int) -> Release:
    """Return what one vector is charged as: a sum with the noise of a quorum, without that of the plan's colluders.

    Where a client has no noise of its own (`shared`), the noise of the sum is charged.
    Guarantee: the budget holds against the server and the colluders that the plan allows for.
    Checked: test_flower_client_account.py::test_a_budget_holds_against_the_server_and_the_plans_colluders.
    """
    release, left = plan.release(run, number, attempt, (), plan.quorum), plan.contributed
    return release if left is None else replace(release, noise=left)
