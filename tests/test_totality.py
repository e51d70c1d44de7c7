"""From the first touch of a client's data its vector comes, whatever fails; what fails later tells nothing of them."""

import io
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from d2pfed.deploy.client import PrivateClient
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.files import FileError
from support.enrolled_clients import enrol, make_plan
from support.failing_lines import Line, Stage
from support.malicious_server import MaliciousServer
from support.touched_client import CLIENTS, REQUESTS, VICTIM, Rows, Seen, TouchedClient
from support.twins import twin

SECRET = "patient 7"
FAILED = "refused", "<class 'd2pfed.errors.PeerError'>:<'this client failed; its own log says why'>"
NOT_SET_UP = "refused", "<class 'd2pfed.errors.ConfigError'>:<'this client is not set up; its own log says why'>"

# Lines of these are outside of what catches errors, and hold no data.
OUTERMOST = {f"flower.client.{name}" for name in ("private", "require_type", "PrivateRecords.__call__", "_answer")}
OUTERMOST |= {"deploy.client.discreet"}

# What runs once the vector has its noise: masking, moving the keys, saving the phase. A function that is new here must
# not see what was trained.
AFTER = """
flower.client: _answer
deploy.client: PrivateClient._contribute PrivateClient.answer
deploy.health: note read_events
flower.grid: to_record
ledger.files: _opened _require_own _write _write_draft locked read_file replace_file sync_directory
ledger.keystore: boot
numerics.compiled: Kernel.__call__
numerics.randomness: Stream.__init__ Stream.fill digest encode_path
numerics.ring: Ring._mask Ring.add_masks_into Ring.mask_word Ring.modulus
numerics.ring: Ring.pack Ring.packed_bytes
secagg.checks: ring_copy
secagg.wire: Reader.__init__ _checksum _open frame message pack_integer pack_subset
"""
AFTER_PAIRWISE = """
deploy.attempt: ClientAttempt.answer
deploy.client: PrivateClient._answer
deploy.state: SavedPhase.encode SavedPhases.save
ledger.files: keep_newest
secagg.pairwise.keys: others
secagg.pairwise.client: Client.met Client.receive Client.save _pack
secagg.crypto: hkdf
secagg.pairwise.keys: pair_mask_key self_mask_key
secagg.pairwise.phases: Shared.answer
secagg.shamir: pack_shares
secagg.wire: kind_of pack_text ranks_of subset_of
"""
AFTER_STANDING = """
deploy.config: ClientConfig.log
deploy.standing: KeyFile._head KeyFile._holds KeyFile.update SiloEpoch.advance join split
ledger.client_log: Anchor.decode ClientHistory.head ClientHistory.holds LogRow.line
ledger.client_log: _integer anchor_after head_after parse require_anchored require_announced
ledger.client_log: ClientLog.__init__ ClientLog._locked ClientLog._read ClientLog._require_anchor ClientLog.read
ledger.files: remove_drafts require_directory
ledger.rows: Head.__post_init__ Head.decode Head.encode
ledger.keystore: VolatileFile._locked VolatileFile._read VolatileFile._write VolatileFile.update _checked require_boot
ledger.keystore: require_fits_log
numerics.randomness: derive first_head next_head
secagg.standing.epoch: context mask_key next_pair_key
secagg.standing.client: State.at State.decode State.encode State.masks answer_step require_step_forward
secagg.wire: Reader.__enter__ Reader.__exit__ Reader.end Reader.integer Reader.rest Reader.subset Reader.take
secagg.wire: Reader.view ranks_of unframe unframe_unbound
"""


def listed(*texts: str) -> set[str]:
    lines = [line.split(": ") for text in texts for line in text.strip().splitlines()]
    return {f"{module}.{name}" for module, names in lines for name in names.split()}


LATE = {"pairwise": listed(AFTER, AFTER_PAIRWISE), "standing": listed(AFTER, AFTER_STANDING)}


class Stopped(BaseException):
    """What nobody expects."""


ERRORS = (MemoryError, SystemExit, KeyboardInterrupt, Stopped, PeerError, ConfigError, FileError, StopIteration)


@dataclass(frozen=True)
class Request:
    """A request that a client holds: what others see if nothing fails, and the lines that are reached."""

    client: TouchedClient
    before: Seen
    normal: Seen
    lines: Counter[Line]

    @staticmethod
    def of(client: TouchedClient) -> "Request":
        before, normal = client.see(SystemExit()), client.using(client.works)
        return Request(client, before, normal, client.lines(client.works))

    def at(self, stage: Stage) -> Counter[Line]:
        return Counter({line: count for line, count in self.lines.items() if line.stage is stage})

    def says_nothing(self, line: Line, seen: Seen) -> bool:
        """Whether the answer came, or one refusal after the charge."""
        said = seen.answer if line.function in OUTERMOST else FAILED
        return seen in (self.normal, replace(self.normal, answer=said))


@pytest.fixture(scope="module")
def requests():
    """Requests by their names; in memory, where there is a place for it: each of thousands syncs its rows."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        yield cache(lambda name: Request.of(REQUESTS[name](Path(place) / name)))


@pytest.fixture
def quiet():
    """No log: thousands of errors are planned."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def kind_of(name: str, stage: Stage) -> str:
    """Requests of one kind share their code in a stage; where data are touched, also the unit must be the same."""
    protocol, what = name.split(maxsplit=1)
    return "" if stage is Stage.BEFORE else f"{protocol} {what == 'records' and stage is Stage.TOUCHED}"


def lines_of(requests, name: str, stage: Stage) -> Counter[Line]:
    """The lines of a request that no earlier request of its kind has."""
    earlier = list(REQUESTS)[: list(REQUESTS).index(name)]
    alike = [other for other in earlier if kind_of(other, stage) == kind_of(name, stage)]
    known = {line for other in alike for line in requests(other).lines}
    return Counter({line: count for line, count in requests(name).at(stage).items() if line not in known})


def fail_each(request: Request, lines: Counter[Line], is_fine, *, last: bool = True, function=None) -> None:
    """Let each line fail the first time that it is reached and, in another request, the last time."""
    wrong, unreached = [], 0
    for line, count in lines.items():
        for time in sorted({1, count if last else 1}):
            seen, is_reached = request.client.failing(line, time, RuntimeError(SECRET), function)
            unreached += not is_reached
            if not is_fine(line, seen):
                wrong.append((line.function, line.number, time, seen.answer))
    assert wrong == []
    assert unreached <= len(lines) // 10  # some depend on coins


@pytest.mark.parametrize("name", REQUESTS)
def test_the_vector_comes_whatever_line_fails_once_data_are_touched(requests, quiet, name):
    request = requests(name)
    lines = lines_of(requests, name, Stage.TOUCHED)
    assert {"round.participant.Participant.encode"} <= {line.function for line in request.at(Stage.TOUCHED)}
    fail_each(request, lines, lambda _line, seen: seen == request.normal)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_line_that_fails_with_the_vector_made_says_nothing_of_data(requests, quiet, name):
    request = requests(name)
    fail_each(request, lines_of(requests, name, Stage.ENCODED), request.says_nothing)


@pytest.mark.parametrize("protocol", LATE)
def test_what_runs_after_the_vector_is_listed(requests, protocol):
    ran = [requests(name).at(Stage.ENCODED) for name in REQUESTS if name.startswith(protocol)]
    assert {line.function for lines in ran for line in lines} == LATE[protocol]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_line_that_fails_before_data_are_touched_costs_at_most_a_charge(requests, quiet, name):
    request = requests(name)
    logs = [(seen.rows, seen.anchor) for seen in (request.before, request.normal)]

    def is_fine(line, seen):
        said = (request.normal.answer, FAILED, NOT_SET_UP)
        return (seen.answer in said or line.function in OUTERMOST) and (seen.rows, seen.anchor) in logs

    fail_each(request, lines_of(requests, name, Stage.BEFORE), is_fine, last=False)


@pytest.mark.parametrize("name", REQUESTS)
def test_errors_of_every_kind_become_zero_and_noise(requests, quiet, name):
    request, kinds = requests(name), cycle(ERRORS)
    for line in list(request.at(Stage.TOUCHED))[::9]:
        kind = next(kinds)
        seen, _ = request.client.failing(line, 1, kind(SECRET))
        assert seen == request.normal, (line.function, line.number, kind)
    for kind in ERRORS:
        assert request.client.using(raising(kind(SECRET))) == request.normal, kind


def raising(error: BaseException):
    """A function of the user's that fails."""

    def fail(*_given):
        raise error

    return fail


@pytest.mark.parametrize("name", ["pairwise training", "standing records"])
def test_a_failure_after_a_failure_says_nothing_of_data(requests, quiet, name):
    """What runs then sees no data: if it fails, the client's machine does."""
    request, fails = requests(name), raising(ValueError(SECRET))
    lines = {line: count for line, count in request.client.lines(fails).items() if line.stage is Stage.TOUCHED}
    fail_each(request, Counter(lines), request.says_nothing, function=fails)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_charge_is_on_the_disk_when_the_users_function_is_called(requests, name):
    request, seen = requests(name), []

    def look(*given):
        seen.append(request.client.see(SystemExit()))
        return request.client.works(*given)

    assert request.client.using(look) == request.normal
    ((rows, anchor),) = [(each.rows, each.anchor) for each in seen]
    assert rows[-1][0] is Entry.CHARGE
    assert (rows, anchor) == (request.normal.rows, request.normal.anchor) != (request.before.rows, None)


# What a user's function may do beside failing


class BrokenHandler(logging.Handler):
    """A handler of logs that a user's function has left in a bad state."""

    def emit(self, _record: logging.LogRecord) -> None:
        raise Stopped(SECRET)


def close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


def change_default_type() -> None:
    torch = pytest.importorskip("torch")
    torch.set_default_dtype(torch.float64)


DISTURBANCES = {
    "prints": lambda: print(SECRET),
    "makes warnings errors": lambda: warnings.simplefilter("error"),
    "makes numpy raise": lambda: np.seterr(all="raise"),
    "goes to another directory": lambda: os.chdir("/"),
    "closes the streams": close_streams,
    "breaks the log": lambda: logging.getLogger("d2pfed").addHandler(BrokenHandler()),
    "changes torch's default type": change_default_type,
}


@contextmanager
def undone() -> Iterator[None]:
    """Undo what a user's function has done to this process."""
    log = logging.getLogger("d2pfed")
    handlers, streams = list(log.handlers), (redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()))
    with streams[0], streams[1], warnings.catch_warnings(), np.errstate(), chdir(Path.cwd()):
        log.addHandler(logging.StreamHandler(sys.stderr))
        yield
    log.handlers[:] = handlers
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_what_else_a_users_function_does_is_not_seen(requests, name, disturb):
    request = requests(name)
    _, context = request.client.grid.apps[100 + VICTIM]
    place = context.node_config["d2pfed-directory"]

    def disturbing(then):
        def function(*given):
            disturb()
            return then(*given)

        return function

    for then in (request.client.works, raising(ValueError(SECRET))):
        with undone():
            os.chdir(request.client.directory)
            context.node_config["d2pfed-directory"] = f"client-{VICTIM}"
            seen = request.client.using(disturbing(then))
        context.node_config["d2pfed-directory"] = place
        assert seen == request.normal


def reply(*records: ArrayRecord):
    return lambda message, _context: Message(
        RecordDict({str(number): record for number, record in enumerate(records)}), reply_to=message
    )


def params(values: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"params": Array(values)})


RETURNED = {
    "nothing": lambda *_given: None,
    "an error": lambda message, _context: Message(Error(0, SECRET), reply_to=message),
    "no arrays": reply(),
    "two records of arrays": reply(params(np.ones(16, np.float32)), params(np.ones(16, np.float32))),
    "other names": reply(ArrayRecord({SECRET: Array(np.ones(16, np.float32))})),
    "another shape": reply(params(np.ones(17, np.float32))),
    "another type": reply(params(np.full(16, 1e300))),
    "no numbers": reply(params(np.full(16, np.nan, np.float32))),
    "infinity": reply(params(np.full(16, np.inf, np.float32))),
    "the largest numbers": reply(params(np.full(16, np.finfo(np.float32).max))),
}


@pytest.mark.parametrize("name", ["pairwise training", "standing training"])
@pytest.mark.parametrize("function", RETURNED.values(), ids=RETURNED)
def test_what_a_users_function_returns_is_not_seen(requests, quiet, name, function):
    request = requests(name)
    assert request.client.using(function) == request.normal


class BadRows(Rows):
    """A silo whose records fail in one way."""

    @property
    def count(self) -> int:
        return -1 if self.rows is None else len(self.rows)

    def gradients(self, chosen: np.ndarray):
        chosen[:] = 0  # what was drawn is not the user's to change
        yield from self.rows
        raise ValueError(SECRET)


@pytest.mark.parametrize(
    "units",
    [
        None,
        SECRET,
        BadRows(None),
        BadRows([np.ones((1, 16), np.float32)] * 20),
        BadRows([np.ones((1, 15), np.float32)] * 20),
        BadRows([np.full((1, 16), np.nan, np.float32)] * 20),
    ],
    ids=["nothing", "a text", "a negative count", "an error at the end", "another shape", "no numbers"],
)
def test_what_a_silos_records_do_is_not_seen(requests, quiet, units):
    request = requests("standing records")
    assert request.client.using(lambda *_given: units) == request.normal


def test_arrays_that_training_changes_in_place_are_its_update(tmp_path):
    def in_place(client):
        def train(arrays, _settings):
            arrays["params"][client] += 1.0
            return arrays

        return train

    plan = make_plan(CLIENTS, dropouts=0.0, mechanism="ddgauss")
    server = MaliciousServer(tmp_path, plan, enrol(tmp_path, CLIENTS), train=in_place)
    server.announce()
    assert server.sum_of_updates(0)[:CLIENTS].min() > 0.5


def test_a_process_that_a_users_function_forks_sends_no_second_vector(requests, quiet, monkeypatch):
    """It has the same noise and the same masks: the difference of two vectors would show the update."""
    request, test, ended = requests("pairwise training"), os.getpid(), []

    def fork(*given):
        child = os.fork()
        if not child:
            sys.exit(0)  # which no longer ends it: errors of a user's function stay inside
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return request.client.works(*given)

    def ask():
        seen = request.client.using(fork)
        if os.getpid() != test:
            os._exit(7 if seen == request.normal else 8)
        return seen

    assert ask() == request.normal
    assert ended == [1]
    lax = twin(PrivateClient._contribute, "if os.getpid() != process:", "if False:")
    monkeypatch.setattr(PrivateClient, "_contribute", lax)
    assert ask() == request.normal
    assert ended == [1, 7]
