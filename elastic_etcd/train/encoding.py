"""Plain values as bytes, and back: how a state's objects travel and are stored.

One byte says what follows, lengths are 8 bytes, little-endian throughout; docs/state.md has the
table. Reading never imports, calls or evaluates anything, unless the user has opted in to pickle.
"""

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_etcd.errors import MalformedState, UsageError

MAX_DEPTH = 100
_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t"}
_MAPPINGS: dict[type, bytes] = {dict: b"m", OrderedDict: b"o", Counter: b"c"}
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_KEYS = (type(None), bool, int, float, str, bytes)


def encode(
    value: Any, tensors: list[torch.Tensor], *, name: str = "value", allow_pickle: bool = False
) -> bytes:
    """`value` as bytes. Its tensors are appended to `tensors`, each storage once, detached.

    Takes None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict and Counter of exactly
    these types (keys: the first six, and tuples of them) and dense tensors, nested up to MAX_DEPTH.
    Raises UsageError, which says where in `name` it met something else.
    """
    writer = _Writer(tensors, allow_pickle)
    writer.write(value, (name,))
    return b"".join(writer.parts)


def decode(data: bytes, tensors: Sequence[torch.Tensor], *, allow_pickle: bool = False) -> Any:
    """What `encode` made bytes of, with `tensors` in the places of its tensors.

    Raises MalformedState for anything that `encode` does not write.
    """
    reader = _Reader(data, tensors, allow_pickle)
    value = reader.read(0)
    if reader.position != len(data):
        raise MalformedState(f"{len(data) - reader.position} bytes follow the value")
    return value


class _Writer:
    def __init__(self, tensors: list[torch.Tensor], allow_pickle: bool) -> None:
        self.parts: list[bytes] = []
        self.tensors = tensors
        self.seen: dict[tuple[Any, ...], int] = {}
        self.allow_pickle = allow_pickle

    def write(self, value: Any, path: tuple[Any, ...]) -> None:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{_spell(path[:4])}... is nested deeper than {MAX_DEPTH} levels")
        if kind in _SEQUENCES:
            self.parts += (_SEQUENCES[kind], _LENGTH.pack(len(value)))
            for index, item in enumerate(value):
                self.write(item, (*path, index))
        elif kind in _MAPPINGS:
            self.parts += (_MAPPINGS[kind], _LENGTH.pack(len(value)))
            for key, item in value.items():
                if not _is_key(key):
                    raise UsageError(f"{_spell(path)}: the key {key!r} can't be encoded")
                self.write(key, (*path, key))
                self.write(item, (*path, key))
        elif isinstance(value, torch.Tensor):
            self.parts += (b"x", _LENGTH.pack(self._index(value, path)))
        else:
            self._scalar(value, kind, path)

    def _scalar(self, value: Any, kind: type, path: tuple[Any, ...]) -> None:
        if value is None or kind is bool:
            self.parts.append({None: b"N", True: b"T", False: b"F"}[value])
        elif kind is int:
            self._bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif kind is float:
            self.parts += (b"d", _FLOAT.pack(value))
        elif kind is str:
            self._bytes(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind is bytes:
            self._bytes(b"b", value)
        elif self.allow_pickle:
            self._bytes(b"p", pickle.dumps(value))
        else:
            raise UsageError(
                f"{_spell(path)} is a {kind.__module__}.{kind.__qualname__}, which can't be "
                "encoded: make it a plain value, register a codec, or set allow_pickle=True"
            )

    def _bytes(self, tag: bytes, data: bytes) -> None:
        self.parts += (tag, _LENGTH.pack(len(data)), data)

    def _index(self, value: torch.Tensor, path: tuple[Any, ...]) -> int:
        tensor = value.detach()
        dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if not dense or tensor.is_quantized or tensor.is_meta:
            raise UsageError(f"{_spell(path)} is no plain dense tensor, which can't be encoded")
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*place, tensor.is_conj(), tensor.is_neg())
        index = self.seen.get(key)
        if index is None or not tensor.numel():
            index = self.seen[key] = len(self.tensors)
            self.tensors.append(tensor)
        return index


class _Reader:
    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor], allow_pickle: bool) -> None:
        self.data = data
        self.tensors = tensors
        self.allow_pickle = allow_pickle
        self.position = 0

    def read(self, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise MalformedState(f"a value is nested deeper than {MAX_DEPTH} levels")
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"d":
            return _FLOAT.unpack(self._take(8))[0]
        (length,) = _LENGTH.unpack(self._take(8))
        if tag == b"x":
            if length >= len(self.tensors):
                raise MalformedState(f"there is no tensor {length}")
            return self.tensors[length]
        for kind, known in _SEQUENCES.items():
            if tag == known:
                return kind([self.read(depth + 1) for _ in range(self._bounded(length, 1))])
        for kind, known in _MAPPINGS.items():
            if tag == known:
                return self._mapping(kind, self._bounded(length, 2), depth)
        return self._scalar(tag, self._take(length))

    def _mapping(self, kind: Callable[[], Any], length: int, depth: int) -> Any:
        found = kind()
        for _ in range(length):
            key = self.read(depth + 1)
            if not _is_key(key):
                raise MalformedState(f"a {type(key).__name__} can't be a key")
            if key in found:
                raise MalformedState(f"the key {key!r} is there twice")
            found[key] = self.read(depth + 1)
        return found

    def _scalar(self, tag: bytes, data: bytes) -> Any:
        if tag == b"i":
            return int.from_bytes(data, "little", signed=True)
        if tag == b"s":
            try:
                return data.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise MalformedState(f"a string is not UTF-8: {error.reason}") from error
        if tag == b"b":
            return data
        if tag == b"p" and self.allow_pickle:
            return pickle.loads(data)  # noqa: S301 - the user trusts the peers and said so
        if tag == b"p":
            raise MalformedState("a pickled value, and allow_pickle is not set")
        raise MalformedState(f"no value begins with {tag!r}")

    def _bounded(self, length: int, each: int) -> int:
        """A number of items that the bytes left may hold: nothing is made for a false one."""
        if length * each > len(self.data) - self.position:
            raise MalformedState(f"{length} items, and {len(self.data) - self.position} bytes")
        return length

    def _take(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise MalformedState(f"the value ends {end - len(self.data)} bytes early")
        taken, self.position = self.data[self.position : end], end
        return taken


def _is_key(key: Any) -> bool:
    return all(type(part) in _KEYS for part in (key if type(key) is tuple else (key,)))


def _spell(path: tuple[Any, ...]) -> str:
    return str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])
