"""Plain values as JSON, and back. Tensors are kept apart, by name.

A value that JSON has no word for is an object with a "$" key; docs/state.md has the table.
Reading never imports, calls or evaluates anything, unless the user has opted in to pickle.
"""

import base64
import json
import pickle
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from math import isfinite, prod
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from elastic_etcd.errors import MalformedState, UsageError
from elastic_etcd.train import accelerator

# For torch's calls of ours: modes, as torch.set_default_device, send each through Python.
without_modes = torch._C.DisableTorchFunction  # noqa: SLF001 - it has no public name

MAX_DEPTH = 100
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", torch.Size: "$size"}
_SETS: dict[type, str] = {set: "$set", frozenset: "$frozenset"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_KINDS: dict[str, Any] = {tag: kind for kind, tag in (_SEQUENCES | _SETS | _MAPPINGS).items()}
_KEYS = (type(None), bool, int, float, str, bytes)
_NUMPY = re.compile(r"[<>|][biufc]\d{1,2}")  # numpy's names of plain numbers
_UNCOPIED = re.compile(r"torch\.u?int[1-7]")
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError)


def encode(
    value: Any,
    tensors: dict[str, torch.Tensor],
    *,
    name: str = "value",
    allow_pickle: bool = False,
    shards: dict[str, Any] | None = None,
) -> Any:
    """Make a tree for `dumps` of `value`, and put its tensors into `tensors`, detached.

    `value` is None, a bool, int, float, str, bytes, torch.dtype or torch.device; a number or an
    array of numbers of numpy's; a dense tensor; or a list, tuple, torch.Size, dict, OrderedDict,
    Counter, set or frozenset of them, of exactly these types, nested up to MAX_DEPTH. Keys and
    members of sets are of the first six, or tuples of them. A tensor is named by where it is in
    `name`, and is there once, however often it occurs. Sharded tensors (DTensor) are put into
    `shards`, if that is given, likewise. Raises UsageError for anything else, which says where it
    is.
    """
    return _Encoder(tensors, allow_pickle, shards).write(value, (name,))


def decode(
    tree: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    allow_pickle: bool = False,
    shards: Mapping[str, Any] | None = None,
) -> Any:
    """The value of a tree that `encode` made, with `tensors`, and `shards`, in their places.

    Raises MalformedState for anything that `encode` does not make.
    """
    try:
        return _Decoder(tensors, allow_pickle, shards or {}).read(tree, 0)
    except MalformedState:
        raise
    except _MALFORMED as error:
        raise MalformedState(f"not what a value is written as: {error}") from error


def dumps(tree: Any) -> bytes:
    """JSON, in ASCII."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(data: bytes) -> Any:
    """Read JSON. Raises MalformedState."""
    try:
        return json.loads(data.decode("ascii"), parse_constant=_refuse_not_a_number)
    except (ValueError, RecursionError) as error:
        raise MalformedState(f"not JSON: {error}") from error


class _Encoder:
    """Makes trees; a path is the value's name and the keys that lead to a place in it."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], allow_pickle: bool, shards: dict[str, Any] | None
    ) -> None:
        self.tensors, self.shards = tensors, shards
        self.seen: dict[tuple[Any, ...], str] = {}
        self.allow_pickle = allow_pickle

    def write(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{_spell_path(path[:4])}... is nested deeper than {MAX_DEPTH} levels")
        if value is None or kind is bool or (kind is str and _is_text(value)):
            return value
        if kind is list:
            return self._write_items(value, path)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._write_items(value, path)}
        if kind in _MAPPINGS:
            return self._write_mapping(value, kind, path)
        if kind in _SETS:  # in an order that is the same in every process
            return {_SETS[kind]: sorted((self._write_key(m, path) for m in value), key=dumps)}
        if self.shards is not None and kind.__name__ == "DTensor":
            return {"$shard": self._name_shard(value, path)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._name_tensor(value, path)}
        return self._write_scalar(value, kind, path)

    def _write_items(self, value: Any, path: tuple[Any, ...]) -> list[Any]:
        return [self.write(item, (*path, index)) for index, item in enumerate(value)]

    def _write_mapping(self, value: Any, kind: type, path: tuple[Any, ...]) -> Any:
        if kind is dict and all(type(k) is str and k[:1] != "$" and _is_text(k) for k in value):
            return {key: self.write(item, (*path, key)) for key, item in value.items()}
        pairs = [
            [self._write_key(key, path), self.write(item, (*path, key))]
            for key, item in value.items()
        ]
        made = {_MAPPINGS[kind]: pairs}
        if hasattr(value, "_metadata"):  # a state dict's: versions of its modules
            made["$metadata"] = self.write(value._metadata, (*path, "_metadata"))  # noqa: SLF001
        return made

    def _write_key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if not _is_key(key):
            raise UsageError(f"{_spell_path(path)}: the key {key!r} can't be encoded")
        return self.write(key, (*path, key))

    def _write_scalar(self, value: Any, kind: type, path: tuple[Any, ...]) -> Any:
        if kind is int:
            return value if value.bit_length() <= 64 else {"$int": hex(value)}
        if kind is float:
            return value if isfinite(value) else {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": _base64(value)}
        if kind is str:
            return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:  # a GPU is each rank's own
            return {"$device": value.type if value.type == accelerator.kind() else str(value)}
        if (written := self._write_numpy(value, kind, path)) is not None:
            return written
        if self.allow_pickle:
            return {"$pickle": _base64(pickle.dumps(value))}
        raise UsageError(
            f"{_spell_path(path)} is a {kind.__module__}.{kind.__qualname__}, which can't be "
            "encoded: make it a plain value, register a codec, or set allow_pickle=True"
        )

    def _write_numpy(self, value: Any, kind: type, path: tuple[Any, ...]) -> Any:
        """None for what is no number, and no array of numbers."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not (isinstance(value, numpy.generic) or kind is numpy.ndarray):
            return None
        if not _NUMPY.fullmatch(value.dtype.str):
            return None
        if isinstance(value, numpy.generic):
            return {"$numpy": [value.dtype.str, _base64(value.tobytes())]}
        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        words = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        return {"$array": [value.dtype.str, list(value.shape), self._name_tensor(words, path)]}

    def _name_tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> str:
        if why := _why_not_dense(value):
            raise UsageError(f"{_spell_path(path)} {why}")
        tensor = value.detach()
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*memory, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and key in self.seen:
            return self.seen[key]
        name = _dotted(path)
        while name in self.tensors:
            name += "_"
        self.seen[key] = name
        self.tensors[name] = tensor
        return name

    def _name_shard(self, value: Any, path: tuple[Any, ...]) -> list[Any]:
        """Its name, dtype and shape, which all ranks have alike."""
        assert self.shards is not None
        with torch.no_grad():  # else it is a step of autograd's
            local = value.to_local()
        # Not its address: a rank's part may be empty, and tied weights are to be so on all ranks.
        memory = (local.untyped_storage()._cdata, local.storage_offset(), value.shape)  # noqa: SLF001
        name = self.seen.setdefault((*memory, value.dtype), _dotted(path))
        self.shards.setdefault(name, value)
        return [name, str(value.dtype).removeprefix("torch."), list(value.shape)]


class _Decoder:
    """Reads trees; a malformed one may raise anything of _MALFORMED."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        allow_pickle: bool,
        shards: Mapping[str, Any],
    ) -> None:
        self.tensors, self.shards = tensors, shards
        self.allow_pickle = allow_pickle

    def read(self, tree: Any, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise MalformedState(f"a value is nested deeper than {MAX_DEPTH} levels")
        if type(tree) is list:
            return [self.read(item, depth + 1) for item in tree]
        if type(tree) is not dict:
            return tree
        tags = [key for key in tree if key[:1] == "$"]
        if not tags:
            return {key: self.read(item, depth + 1) for key, item in tree.items()}
        if tags == ["$ordered", "$metadata"] and len(tree) == 2:
            made = self._read_tagged("$ordered", tree["$ordered"], depth)
            made._metadata = self.read(tree["$metadata"], depth + 1)  # noqa: SLF001 - torch's name
            return made
        if len(tree) != 1:
            raise MalformedState(f"no value is written as {tags[0]} with {len(tree) - 1} more")
        return self._read_tagged(tags[0], tree[tags[0]], depth)

    def _read_tagged(self, tag: str, content: Any, depth: int) -> Any:
        kind = _KINDS.get(tag)
        if kind is None:
            return self._read_scalar(tag, content)
        if type(content) is not list:
            raise MalformedState(f"{tag} is not followed by a list")
        if kind in _MAPPINGS:
            return self._read_mapping(kind, content, depth)
        items = [self.read(item, depth + 1) for item in content]
        made = kind(items)
        if kind in _SETS and (len(made) != len(items) or not all(map(_is_key, items))):
            raise MalformedState(f"a {kind.__name__} has a member twice, or one that is none")
        return made

    def _read_mapping(self, kind: Any, pairs: list[Any], depth: int) -> Any:
        found = kind()
        for key_tree, item in pairs:
            key = self.read(key_tree, depth + 1)
            if not _is_key(key):
                raise MalformedState(f"a {type(key).__name__} can't be a key")
            if key in found:
                raise MalformedState(f"the key {key!r} is there twice")
            found[key] = self.read(item, depth + 1)
        return found

    def _read_scalar(self, tag: str, content: Any) -> Any:
        match tag:
            case "$tensor" | "$shard":
                return self._find_tensor(tag, content)
            case "$array":
                return self._read_array(*content)
            case "$numpy":
                return self._read_number(*content)
            case "$int" if hex(int(content, 16)) == content:
                return int(content, 16)
            case "$float" if content in {"nan", "inf", "-inf"}:
                return float(content)
            case "$bytes":
                return _from_base64(content)
            case "$str":
                return _from_base64(content).decode("utf-8", "surrogatepass")
            case "$dtype":
                return DTYPES[content]
            case "$device":
                if content == accelerator.kind() and accelerator.devices().is_available():
                    return accelerator.current_device()  # this process's own
                return torch.device(content)
            case "$pickle":
                return self._read_pickle(content)
            case _:
                raise MalformedState(f"no value is written as {tag!r}")

    def _read_pickle(self, content: str) -> Any:
        if self.allow_pickle:
            return pickle.loads(_from_base64(content))  # noqa: S301 - the user trusts the peers
        raise MalformedState("a pickled value, and allow_pickle is not set")

    def _find_tensor(self, tag: str, content: Any) -> torch.Tensor:
        known, name = (self.shards, content[0]) if tag == "$shard" else (self.tensors, content)
        if name not in known:
            raise MalformedState(f"there is no tensor {name!r}")
        return known[name]

    def _read_number(self, dtype: str, content: str) -> Any:
        (number,) = _numpy().frombuffer(_from_base64(content), _numpy_dtype(dtype))
        return number

    def _read_array(self, dtype: str, shape: list[int], name: str) -> Any:
        words, kind = self._find_tensor("$tensor", name), _numpy_dtype(dtype)
        for length in shape:
            if type(length) is not int or length < 0:
                raise MalformedState(f"{length!r} is no length")
        size = prod(shape) * kind.itemsize
        if words.dtype != torch.uint8 or words.shape != (size,):
            raise MalformedState(f"{name!r} is no array of {shape}")
        return words.cpu().numpy().view(kind).reshape(shape).copy()  # the tensor may be borrowed


def _numpy() -> Any:
    """numpy, which a program need not have."""
    try:
        import numpy as np  # noqa: PLC0415
    except ImportError as error:
        raise MalformedState("a number of numpy's, which is not installed here") from error
    return np


def _numpy_dtype(name: str) -> Any:
    if not _NUMPY.fullmatch(name) or (dtype := _numpy().dtype(name)).str != name:
        raise MalformedState(f"{name!r} is no number of numpy's")
    return dtype


def _why_not_dense(tensor: torch.Tensor) -> str:
    """Why it can't be encoded, if so."""
    if type(tensor).__name__ in {"DTensor", "ShardedTensor"}:
        return (
            f"is a {type(tensor).__name__}, of which each rank holds another part: ElasticState "
            "keeps what all ranks have alike, as DistributedDataParallel does"
        )
    if _UNCOPIED.fullmatch(name := str(tensor.dtype)):
        return f"is of {name}, which torch can't copy: keep the torch.uint8 that it is packed in"
    if is_lazy(tensor):
        return "has no shape yet: give the model a batch before the first commit"
    kind = type(tensor)  # a parameter of any class is detached as a plain tensor
    plain = kind is torch.Tensor or issubclass(kind, torch.nn.Parameter)
    dense = plain and tensor.layout == torch.strided
    if not dense or tensor.is_quantized or tensor.is_meta:
        return "is no plain dense tensor, which can't be encoded"
    return ""


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)).encode("utf-8", "backslashreplace").decode()


def _is_key(key: Any) -> bool:
    return all(type(part) in _KEYS for part in (key if type(key) is tuple else (key,)))


def _is_text(text: str) -> bool:
    """Whether JSON has it: two halves of a pair would come back as one character."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _refuse_not_a_number(name: str) -> None:
    raise ValueError(f"{name} is none of its numbers")


def _spell_path(path: tuple[Any, ...]) -> str:
    return str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])
