"""Requests as tasks of NVFlare's: one for each request and site, its answer matched by the request's id.

This file imports nothing of NVFlare's: the controller gives it a function that sends a task.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from d2pfed.deploy.client import Purpose
from d2pfed.deploy.requests import RequestKind
from d2pfed.deploy.transport import Answer
from d2pfed.errors import PeerError
from d2pfed.nvflare.sites import node_of

TASK = "d2pfed"  # the name of every task

Fields = Mapping[str, object]  # the fields of a task, or of its result

_KIND, _DATA, _PURPOSE, _ERROR = "d2pfed.kind", "d2pfed.data", "d2pfed.purpose", "d2pfed.error"


class Sender(Protocol):
    """What a controller offers."""

    def require_running(self) -> None:
        """Raise once the job is aborted."""
        ...

    def sites(self) -> Iterable[str]:
        """Return the sites of the job that are connected now."""
        ...

    def send(self, site: str, fields: Fields, seconds: int, answered: Callable[[Fields | None], None]) -> None:
        """Send a task to a site; call `answered` with the result's fields, or None if the task ends without one."""
        ...


@dataclass(slots=True)
class TaskEngine:
    """NVFlare's tasks (`deploy.transport.Engine`).

    An answer that was not collected within its request's time is handed out then, so that the transport counts it as
    late.
    """

    sender: Sender
    purpose: Purpose = Purpose.TRAINING
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _answers: dict[str, tuple[Answer, float]] = field(default_factory=dict)  # by request, and how long it is kept

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        self.sender.require_running()
        return {node_of(site) for site in self.sender.sites()}

    def push(
        self, kind: RequestKind, data: bytes, node: int, name: str, seconds: float, *, blob: bytes = b""
    ) -> str | None:
        """Send a request of an exchange; return its id, or nothing if its site is gone."""
        site = next((site for site in self.sender.sites() if node_of(site) == node), None)
        if site is None:
            return None
        request, until = f"{name}-{next(self._numbers)}", time.monotonic() + seconds

        def answered(fields: Fields | None) -> None:
            self._answers[request] = replace(read_result(fields, node), request=request), until

        fields = {_KIND: kind.value, _DATA: data + blob, _PURPOSE: self.purpose.value}
        self.sender.send(site, fields, math.ceil(seconds), answered)
        return request

    def pull(self, requests: Collection[str]) -> Iterator[Answer]:
        """Return the answers to these requests that are there, and those that are too late for anyone."""
        self.sender.require_running()
        now = time.monotonic()
        for request, (_, until) in list(self._answers.items()):  # a copy: other threads add answers
            if request in requests or now > until:
                yield self._answers.pop(request)[0]


def read_task(fields: Fields) -> tuple[RequestKind, bytes, Purpose]:
    """Return what a task asks for; refuse anything that d2pfed has not sent."""
    kind, data, purpose = (fields.get(name) for name in (_KIND, _DATA, _PURPOSE))
    if kind not in set(RequestKind) or purpose not in set(Purpose) or not isinstance(data, bytes):
        raise PeerError("a task must have the kind, the purpose and the bytes of a request of d2pfed")
    return RequestKind(str(kind)), data, Purpose(str(purpose))


def make_result(kind: RequestKind, data: bytes) -> Fields:
    """Return the fields of an answer."""
    return {_KIND: kind.value, _DATA: data}


def make_refusal(error: Exception) -> Fields:
    """Return the fields of a result that says why there is no answer, by an error whose text may be sent."""
    return {_ERROR: str(error)}


def read_result(fields: Fields | None, node: int) -> Answer:
    """Return the answer in a site's result."""
    if fields is None:
        return Answer("", node, refused=("refused or failed", "the task has ended without a result"))
    kind, data, error = (fields.get(name) for name in (_KIND, _DATA, _ERROR))
    if isinstance(error, str):
        return Answer("", node, refused=("refused or failed", error))
    if kind not in set(RequestKind) or not isinstance(data, bytes):
        return Answer("", node, refused=("malformed", "a result must have the kind and the bytes of an answer"))
    return Answer("", node, RequestKind(str(kind)), data)
