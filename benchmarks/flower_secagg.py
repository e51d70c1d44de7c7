"""A round of Flower's SecAgg+ by its own functions, in one process, for comparison; needs flwr."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any  # flwr need not be installed, so its functions are reached by name and have no types

import numpy as np

from d2pfed.errors import ConfigError

_CLIENT = "flwr.client.mod.secure_aggregation.secaggplus_mod"
_SERVER = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"
_MODULUS = 1 << 32  # the values that Flower sets if nothing else is asked for
_DEFAULTS = {"clipping_range": 8.0, "target_range": 1 << 22, "mod_range": _MODULUS, "max_weight": 1000.0}
_SECRETS = 3  # that the server's work is timed on where it is scaled


@dataclass(frozen=True, slots=True)
class FlowerCost:
    """Processor seconds of the mean client and of the server, and the bytes that a client sends."""

    client_seconds: float
    server_seconds: float
    round_seconds: float
    upload_bytes: int


class _Clock:
    """Adds up processor seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        begun = time.process_time()
        yield
        self.seconds += time.process_time() - begun


def measure_flower(clients: int, dimension: int, lost: frozenset[int]) -> FlowerCost:
    """Run one round on the complete graph, two thirds as threshold, vectors of zeros; check the sum."""
    module, begun = import_module(_CLIENT), time.perf_counter()
    client_clock, server_clock = _Clock(), _Clock()
    names = list(range(clients))
    survivors = [name for name in names if name not in lost]
    limits = _DEFAULTS | {"sample_num": clients, "share_num": clients, "threshold": 2 * clients // 3 + 1}
    states = {name: module.SecAggPlusState(nid=name) for name in names}
    with client_clock.running():
        publics = {str(name): list(module._setup(states[name], limits).values()) for name in names}  # noqa: SLF001
        shared = {name: module._share_keys(states[name], publics) for name in names}  # noqa: SLF001
    with server_clock.running():
        forwarded = _forward(shared)
    parameters = import_module("flwr.common").ndarrays_to_parameters([np.zeros(dimension, np.float32)])
    with client_clock.running():
        masked = {
            name: module._collect_masked_vectors(states[name], forwarded[name], 1, parameters)  # noqa: SLF001
            for name in survivors
        }
        question = {"active_nids": survivors, "dead_nids": sorted(lost)}
        opened = {name: module._unmask(states[name], question) for name in survivors}  # noqa: SLF001
    with server_clock.running():
        total = _unmask(publics, masked, opened, lost)
    if not np.array_equal(total[0], [len(survivors) * round(_DEFAULTS["target_range"] / _DEFAULTS["max_weight"])]):
        raise ConfigError("the sum of weights is wrong, so its cost means nothing")
    sent = sum(_size(answer[survivors[0]]) for answer in (shared, masked, opened)) + _size(publics["0"])
    return FlowerCost(client_clock.seconds / clients, server_clock.seconds, time.perf_counter() - begun, sent)


def estimate_flower(clients: int, dimension: int, dropouts: int) -> FlowerCost:
    """Time one client in full and the server's work on three secrets, and scale them to all clients and secrets.

    At a thousand clients a whole round takes hours, nearly all of them in splitting and joining secrets.
    """
    module, server = import_module(_CLIENT), import_module(_SERVER)
    limits = _DEFAULTS | {"sample_num": clients, "share_num": clients, "threshold": 2 * clients // 3 + 1}
    client_clock, join_clock, mask_clock = _Clock(), _Clock(), _Clock()
    state, begun = module.SecAggPlusState(nid=0), time.perf_counter()
    publics = {
        str(name): list(module._setup(module.SecAggPlusState(nid=name), limits).values())  # noqa: SLF001
        for name in range(1, clients)
    }
    with client_clock.running():
        publics = {"0": list(module._setup(state, limits).values())} | publics  # noqa: SLF001
        shared = module._share_keys(state, publics)  # noqa: SLF001
    shares = state.rd_seed_share_dict[0], state.sk1_share_dict[0]  # all are of these sizes
    concat, encrypt = module.share_keys_plaintext_concat, module.encrypt
    inbox = {
        "srcs": list(range(1, clients)),
        "ctxts": [encrypt(state.ss2_dict[name], concat(name, 0, *shares)) for name in range(1, clients)],
    }
    parameters = import_module("flwr.common").ndarrays_to_parameters([np.zeros(dimension, np.float32)])
    survivors, lost = list(range(clients - dropouts)), list(range(clients - dropouts, clients))
    with client_clock.running():
        masked = module._collect_masked_vectors(state, inbox, 1, parameters)  # noqa: SLF001
        opened = module._unmask(state, {"active_nids": survivors, "dead_nids": lost})  # noqa: SLF001
    dealt = module.create_shares(state.rd_seed, limits["threshold"], clients)[: len(survivors)]
    vector = [server.bytes_to_ndarray(part) for part in masked["masked_params"]]
    for _ in range(_SECRETS):
        with join_clock.running():
            secret = server.combine_shares(dealt)
        if secret != state.rd_seed:
            raise ConfigError("a secret was joined wrongly, so its cost means nothing")
        with mask_clock.running():
            mask = server.pseudo_rand_gen(secret, _MODULUS, server.get_parameters_shape(vector))
            server.parameters_subtraction(vector, mask)
    masks = len(survivors) + dropouts * (clients - 1)
    server_seconds = (clients * join_clock.seconds + masks * mask_clock.seconds) / _SECRETS
    sent = sum(_size(answer) for answer in (shared, masked, opened)) + _size(publics["0"])
    return FlowerCost(client_clock.seconds, server_seconds, time.perf_counter() - begun, sent)


def _forward(shared: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, list[Any]]]:
    forwarded: dict[int, dict[str, list[Any]]] = {name: {"ctxts": [], "srcs": []} for name in shared}
    for source, answer in shared.items():
        for name, box in zip(answer["dsts"], answer["ctxts"], strict=True):
            forwarded[name]["ctxts"].append(box)
            forwarded[name]["srcs"].append(source)
    return forwarded


def _unmask(
    publics: Mapping[str, Any], masked: Mapping[int, Any], opened: Mapping[int, Any], lost: frozenset[int]
) -> list[Any]:
    server = import_module(_SERVER)
    total = None
    for answer in masked.values():
        vector = [server.bytes_to_ndarray(part) for part in answer["masked_params"]]
        total = vector if total is None else server.parameters_addition(total, vector)
    total = server.parameters_mod(total, _MODULUS)
    shapes = server.get_parameters_shape(total)
    shares: dict[int, list[bytes]] = {int(name): [] for name in publics}
    for answer in opened.values():
        for owner, share in zip(answer["nids"], answer["shares"], strict=True):
            shares[owner].append(share)
    for owner, held in shares.items():
        secret = server.combine_shares(held)
        if owner not in lost:
            mask = server.pseudo_rand_gen(secret, _MODULUS, shapes)
            total = server.parameters_subtraction(total, mask)
            continue
        for other in (name for name in shares if name != owner):
            key = server.generate_shared_key(
                server.bytes_to_private_key(secret), server.bytes_to_public_key(publics[str(other)][0])
            )
            apply = server.parameters_addition if owner > other else server.parameters_subtraction
            total = apply(total, server.pseudo_rand_gen(key, _MODULUS, shapes))
    return list(server.parameters_mod(total, _MODULUS))


def _size(answer: object) -> int:
    """Return the bytes in an answer, a number counted as eight."""
    if isinstance(answer, bytes):
        return len(answer)
    if isinstance(answer, int):
        return 8
    if isinstance(answer, Mapping):
        return sum(_size(part) for part in answer.values())
    return sum(_size(part) for part in answer) if isinstance(answer, list) else 0
