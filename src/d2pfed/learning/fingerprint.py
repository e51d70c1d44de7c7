"""Digests of modules, functions and data by what they hold and do, so that others can be told from them."""

import math
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from hashlib import blake2b
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

MOST_VALUES = 4096  # of an array that are read; of a larger one, this number, evenly spaced
MOST_ITEMS = 10_000  # of a list or dictionary, as above
MOST_GROUPS = 64  # of clients, by which a difference is named
_ATOMS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    np.generic,
    range,
    slice,
    PurePath,
    torch.dtype,
    torch.device,
)
_NO_BEHAVIOR = ("__dict__", "__weakref__", "__doc__", "__annotations__", "training")


def fingerprint(parts: Mapping[str, object], clients: object) -> dict[str, str]:
    """Return a digest of each part by name, and of the data of clients that are at hand.

    Of the module `module` values of parameters do not count: a resumed run has its own. A function's clients are not
    at hand, so the caller has one of them among `parts`; the function counts by its code alone, as it may keep data.
    """
    found = {
        name: _Reader(with_parameters=name != "module").read(part).hex()
        for name, part in parts.items()
        if part is not None
    }
    reader = _Reader()
    if not isinstance(clients, (list, tuple, dict)):
        code = getattr(clients, "__code__", type(clients))
        return found | {"clients": reader.read(clients if isinstance(clients, str) else code).hex()}
    held = list(clients.items()) if isinstance(clients, dict) else list(clients)
    size = max(1, -(-len(held) // MOST_GROUPS))
    for start in range(0, len(held), size):
        end = min(start + size, len(held))
        name = f"client {start}" if size == 1 else f"clients {start} to {end - 1}"
        found[name] = reader.joined(*map(reader.read, held[start:end])).hex()
    return found


@dataclass
class _Reader:
    """Digests of values by what they hold; an object that cannot be looked into counts by its class."""

    with_parameters: bool = True
    _seen: dict[int, tuple[object, bytes]] = field(default_factory=dict)  # the value too, which keeps its id

    @staticmethod
    def joined(*parts: str | bytes) -> bytes:
        """Return the digest of some texts and digests."""
        found = blake2b(digest_size=16)
        for part in parts:
            data = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
            found.update(len(data).to_bytes(8, "little") + data)
        return found.digest()

    def read(self, value: Any) -> bytes:  # noqa: ANN401 - whatever a user has
        """Return the digest of a value."""
        if value is None or isinstance(value, _ATOMS):
            return self.joined(type(value).__name__, repr(value))
        if id(value) not in self._seen:
            self._seen[id(value)] = value, b"within itself"
            try:
                found = self._look_into(value)
            except Exception:  # noqa: BLE001 - whatever a user's object raises when it is looked into
                found = self.joined("unknown", type(value).__name__)
            self._seen[id(value)] = value, found
        return self._seen[id(value)][1]

    def _look_into(self, value: Any) -> bytes:  # noqa: ANN401 - as above
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._array(value)
        if isinstance(value, Mapping):
            return self.joined("mapping", *map(self.read, _spread(list(value.items()))), f"{len(value)}")
        if isinstance(value, (list, tuple, deque)):
            return self.joined("list", *map(self.read, _spread(list(value))), f"{len(value)}")
        if isinstance(value, (set, frozenset)):
            return self.joined("set", *sorted(map(self.read, value)))
        if isinstance(value, CodeType):
            constants = [self.read(each) for each in value.co_consts]
            return self.joined("code", value.co_code, *value.co_names, *value.co_freevars, *constants)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, ModuleType):
            return self.joined("name", str(value.__name__))
        if isinstance(value, BuiltinFunctionType):  # a method of an object, or a function of a module
            return self.joined("name", str(value.__name__), self.read(value.__self__))
        if isinstance(value, type):
            known = ("class", value.__module__, value.__qualname__)
            if _is_library(value.__module__):
                return self.joined(*known)
            own = [each for name, each in vars(value).items() if name not in _NO_BEHAVIOR]
            return self.joined(*known, *map(self.read, (*value.__bases__, *own)))
        return self.joined("object", *map(self.read, (type(value), *_state(value))))

    def _function(self, value: FunctionType) -> bytes:
        """Return the digest of a function: its code, or its name in a library, and what it takes from elsewhere."""
        used: list[object] = [value.__defaults__, value.__kwdefaults__]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                used.append(cell.cell_contents)
        if _is_library(value.__module__):
            return self.joined("function", value.__module__, value.__qualname__, *map(self.read, used))
        nested, names = [value.__code__], list[str]()
        while nested:  # functions within it read the same globals
            code = nested.pop()
            names += code.co_names
            nested += [each for each in code.co_consts if isinstance(each, CodeType)]
        used += [value.__globals__[name] for name in names if name in value.__globals__]
        modules = [each for each in used if isinstance(each, ModuleType)]
        for module in modules:  # those of a user's own: what is taken from them by name
            found = [] if _is_library(module.__name__) else [vars(module).get(name) for name in names]
            modules += [each for each in found if isinstance(each, ModuleType) and each not in modules]
            used += found
        return self.joined("function", *map(self.read, (value.__code__, *used)))

    def _array(self, value: "torch.Tensor | np.ndarray[Any, Any]") -> bytes:
        """Return the digest of an array: its type, its shape, and its values or a sample of them."""
        known = ("array", str(value.dtype), str(tuple(value.shape)))
        if isinstance(value, np.ndarray) and value.dtype == object:
            return self.joined(*known, *map(self.read, _spread(value.reshape(-1).tolist())))
        if isinstance(value, torch.nn.Parameter) and not self.with_parameters:
            return self.joined(*known)
        count = math.prod(value.shape)
        if count > MOST_VALUES:
            rows = max(64, MOST_VALUES * len(value) // count)
            some = value[:: -(-len(value) // rows)].reshape(-1)
            value = some[:: -(-len(some) // MOST_VALUES)]
        if isinstance(value, torch.Tensor):  # bytes, as numpy does not know all of torch's types
            value = value.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return self.joined(*known, value.tobytes())


def _state(value: Any) -> tuple[object, ...]:  # noqa: ANN401 - as above
    """Return what an object holds that decides what it does."""
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, DataLoader):
        return value.dataset, value.sampler, value.batch_sampler, value.collate_fn
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    if hasattr(value, "_orig_mod"):  # of torch.compile
        return (value._orig_mod,)  # noqa: SLF001 - no public name
    if hasattr(value, "__wrapped__"):  # of a cache or a decorator
        return (value.__wrapped__,)
    if hasattr(value, "to_numpy"):  # of pandas
        return (value.to_numpy(),)
    is_standard = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    if is_standard:  # locks and files cannot be reduced; generators change from call to call
        return () if type(value).__module__ == "random" else value.__reduce_ex__(2)[1:3]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):  # the numbers of hooks grow from module to module
        held = {name: list(each.values()) if "_hooks" in name else each for name, each in held.items()}
    return ({name: each for name, each in held.items() if name not in _NO_BEHAVIOR},)


def _spread(items: Sequence[object]) -> Sequence[object]:
    """Return items, or some that are evenly spaced if there are many."""
    return items[:: max(1, -(-len(items) // MOST_ITEMS))]


def _is_library(module: object) -> bool:
    """Whether a module of this name is part of Python or of an installed package, whose code is not a user's."""
    top = str(module).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file
    return top in sys.stdlib_module_names or top == "d2pfed" or installed
