"""How values are saved and loaded: a codec makes each plain, and plain values become bytes.

A codec stands for one type and makes plain values and tensors of its values. `encode` makes bytes
of plain values and keeps their tensors apart. One byte says what follows, lengths are 8 bytes,
little-endian throughout; docs/state.md has the table. Reading never imports, calls or evaluates
anything, unless the user has opted in to pickle.
"""

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_etcd.errors import MalformedState, UsageError

MAX_DEPTH = 100
_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t"}
_MAPPINGS: dict[type, bytes] = {dict: b"m", OrderedDict: b"o", Counter: b"c"}
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_KEYS = (type(None), bool, int, float, str, bytes)


class Codec(Protocol):
    """Makes plain values and tensors of a value of one type, and puts them back.

    `save(value)` returns what `encode` takes; its tensors are read before commit()
    returns, so they may be the live ones. `load(value, saved)` returns what the attribute is from
    then on, which may be `value`, changed. The tensors in `saved` are the codec's to keep, unless
    it has `borrows = True`: then they are the snapshot itself, to be copied and never changed.
    """

    def save(self, value: Any) -> Any: ...

    def load(self, value: Any, saved: Any) -> Any: ...


@runtime_checkable
class Stateful(Protocol):
    """What is saved by its state_dict: schedulers, samplers, GradScaler, many others."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class _Plain:
    """Values that are plain themselves, tensors among them; load replaces them."""

    def save(self, value: Any) -> Any:
        return value

    def load(self, value: Any, saved: Any) -> Any:  # noqa: ARG002 - the protocol's
        return saved


class _StateDict:
    """Whatever has a state_dict."""

    def save(self, value: Any) -> Any:
        return value.state_dict()

    def load(self, value: Any, saved: Any) -> Any:
        value.load_state_dict(saved)
        return value


class _Module:
    """A module's own parameters and buffers: whether it is wrapped makes no difference."""

    borrows = True

    def save(self, value: Any) -> Any:
        return dict(_unwrapped(value).state_dict())

    def load(self, value: Any, saved: Any) -> Any:
        _unwrapped(value).load_state_dict(saved)
        return value


class _Optimizer(_StateDict):
    """Loads into the optimizer's own tensors where they fit, which saves making new ones."""

    borrows = True

    def load(self, value: Any, saved: Any) -> Any:
        return super().load(value, _copy_into(value.state_dict(), saved, set()))


class _Scaler(_StateDict):
    """Also forgets what it knows of a step that was not finished, which no state_dict has."""

    def load(self, value: Any, saved: Any) -> Any:
        super().load(value, saved)
        # Used before, so that update() may be called; one that is disabled has no such attribute.
        if value.is_enabled() and value._scale is not None:  # noqa: SLF001
            value.update(value.get_scale())
        return value


class _Generator:
    def save(self, value: Any) -> Any:
        return value.get_state()

    def load(self, value: Any, saved: Any) -> Any:
        value.set_state(saved)
        return value


_PLAIN = _Plain()
_STATE_DICT = _StateDict()
_codecs: dict[type, Codec] = {
    torch.nn.Module: _Module(),
    torch.optim.Optimizer: _Optimizer(),
    torch.Generator: _Generator(),
    torch.amp.GradScaler: _Scaler(),
}


def codec_of(value: Any) -> Codec:
    """The codec of its type, or else of the nearest base class that has one."""
    for base in type(value).__mro__:
        if base in _codecs:
            return _codecs[base]
    return _STATE_DICT if isinstance(value, Stateful) else _PLAIN


def register(kind: type, codec: Codec) -> None:
    """Let `codec` save and load the values of `kind` and of its subclasses."""
    if not callable(getattr(codec, "save", None)) or not callable(getattr(codec, "load", None)):
        raise UsageError(f"a codec has save(value) and load(value, saved): {codec!r} has not")
    _codecs[kind] = codec


def save_values(
    values: dict[str, Any], *, allow_pickle: bool
) -> tuple[dict[str, bytes], list[torch.Tensor]]:
    """Encode each value by its type's codec; the bytes by name, and the tensors of all.

    Raises UsageError.
    """
    tensors: list[torch.Tensor] = []
    parts = {
        name: encode(codec_of(value).save(value), tensors, name=name, allow_pickle=allow_pickle)
        for name, value in values.items()
    }
    return parts, tensors


def load_values(
    values: dict[str, Any],
    parts: dict[str, bytes],
    tensors: Sequence[tuple[torch.Tensor, bool]],
    *,
    allow_pickle: bool,
) -> None:
    """Set `values` to what the parts were saved of; none is changed before all could be read.

    tensors: views of the snapshot, and whether each was on a GPU. Raises MalformedState, and
    UsageError for parts of other names.
    """
    if parts.keys() != values.keys():
        theirs, ours = ", ".join(parts), ", ".join(values)
        raise UsageError(f"the snapshot is of {theirs}; this state is of {ours}")
    views, clones = [tensor for tensor, _ in tensors], _Clones(tensors)
    loads = []
    for name, value in values.items():
        codec = codec_of(value)
        given = views if getattr(codec, "borrows", False) else clones
        saved = decode(parts[name], given, allow_pickle=allow_pickle)
        loads.append((name, value, codec, saved))
    for name, value, codec, saved in loads:
        values[name] = codec.load(value, saved)


class _Clones(Sequence[torch.Tensor]):
    """A snapshot's tensors, each copied when it is asked for, to a GPU if it was on one."""

    def __init__(self, tensors: Sequence[tuple[torch.Tensor, bool]]) -> None:
        self._tensors = tensors
        self._made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            tensor, cuda = self._tensors[index]
            made = tensor.cuda() if cuda and torch.cuda.is_available() else tensor.clone()
            self._made[index] = made
        return self._made[index]


def _unwrapped(module: Any) -> Any:
    """The module that the user wrote, out of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # noqa: SLF001 - torch.compile has no public name for it
            module = module._orig_mod  # noqa: SLF001
        else:
            return module


def _copy_into(live: Any, saved: Any, taken: set[int]) -> Any:
    """`saved`, its tensors copied into those of `live` at the same place, or else cloned.

    `taken` are the addresses that were copied to: of two tensors that share memory only one is.
    """
    if isinstance(saved, torch.Tensor):
        if not isinstance(live, torch.Tensor) or live.data_ptr() in taken:
            return saved.clone()
        if live.shape != saved.shape or live.dtype != saved.dtype:
            return saved.clone()
        taken.add(live.data_ptr())
        with torch.no_grad():
            return live.copy_(saved)
    if type(saved) is dict:
        known = live if isinstance(live, dict) else {}
        return {key: _copy_into(known.get(key), value, taken) for key, value in saved.items()}
    if type(saved) in {list, tuple}:
        lives = live if isinstance(live, (list, tuple)) and len(live) == len(saved) else ()
        items = zip(saved, lives or (None,) * len(saved), strict=True)
        return type(saved)(_copy_into(item, value, taken) for value, item in items)
    return saved


def encode(
    value: Any, tensors: list[torch.Tensor], *, name: str = "value", allow_pickle: bool = False
) -> bytes:
    """Make bytes of `value` and append its tensors to `tensors`, each storage once, detached.

    `value` is None, a bool, int, float, str, bytes, list, tuple, dict, OrderedDict or Counter of
    exactly these types (keys: the first six, and tuples of them) or a dense tensor, nested up to
    MAX_DEPTH. Raises UsageError for anything else, which says where in `name` it is.
    """
    encoder = _Encoder(tensors, allow_pickle)
    encoder.write(value, (name,))
    return b"".join(encoder.parts)


def decode(data: bytes, tensors: Sequence[torch.Tensor], *, allow_pickle: bool = False) -> Any:
    """Read what `encode` wrote, with `tensors` in the places of its tensors.

    Raises MalformedState for anything that `encode` does not write.
    """
    decoder = _Decoder(data, tensors, allow_pickle)
    value = decoder.read(0)
    if decoder.position != len(data):
        raise MalformedState(f"{len(data) - decoder.position} bytes follow the value")
    return value


class _Encoder:
    """Appends to `parts`; a path is the value's name and the keys that lead to a place in it."""

    def __init__(self, tensors: list[torch.Tensor], allow_pickle: bool) -> None:
        self.parts: list[bytes] = []
        self.tensors = tensors
        self.seen: dict[tuple[Any, ...], int] = {}
        self.allow_pickle = allow_pickle

    def write(self, value: Any, path: tuple[Any, ...]) -> None:
        kind = type(value)
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{_spell_path(path[:4])}... is nested deeper than {MAX_DEPTH} levels")
        if kind in _SEQUENCES:
            self.parts += (_SEQUENCES[kind], _LENGTH.pack(len(value)))
            for index, item in enumerate(value):
                self.write(item, (*path, index))
        elif kind in _MAPPINGS:
            self.parts += (_MAPPINGS[kind], _LENGTH.pack(len(value)))
            for key, item in value.items():
                if not _is_key(key):
                    raise UsageError(f"{_spell_path(path)}: the key {key!r} can't be encoded")
                self.write(key, (*path, key))
                self.write(item, (*path, key))
        elif isinstance(value, torch.Tensor):
            self.parts += (b"x", _LENGTH.pack(self._index_tensor(value, path)))
        else:
            self._write_scalar(value, kind, path)

    def _write_scalar(self, value: Any, kind: type, path: tuple[Any, ...]) -> None:
        if value is None or kind is bool:
            self.parts.append({None: b"N", True: b"T", False: b"F"}[value])
        elif kind is int:
            self._write_bytes(
                b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            )
        elif kind is float:
            self.parts += (b"d", _FLOAT.pack(value))
        elif kind is str:
            self._write_bytes(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind is bytes:
            self._write_bytes(b"b", value)
        elif self.allow_pickle:
            self._write_bytes(b"p", pickle.dumps(value))
        else:
            raise UsageError(
                f"{_spell_path(path)} is a {kind.__module__}.{kind.__qualname__}, which can't be "
                "encoded: make it a plain value, register a codec, or set allow_pickle=True"
            )

    def _write_bytes(self, tag: bytes, data: bytes) -> None:
        self.parts += (tag, _LENGTH.pack(len(data)), data)

    def _index_tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> int:
        tensor = value.detach()
        dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided
        if not dense or tensor.is_quantized or tensor.is_meta:
            raise UsageError(
                f"{_spell_path(path)} is no plain dense tensor, which can't be encoded"
            )
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*memory, tensor.is_conj(), tensor.is_neg())
        index = self.seen.get(key)
        if index is None or not tensor.numel():
            index = self.seen[key] = len(self.tensors)
            self.tensors.append(tensor)
        return index


class _Decoder:
    """Reads `data` from `position` on."""

    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor], allow_pickle: bool) -> None:
        self.data = data
        self.tensors = tensors
        self.allow_pickle = allow_pickle
        self.position = 0

    def read(self, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise MalformedState(f"a value is nested deeper than {MAX_DEPTH} levels")
        tag = self._take_bytes(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"d":
            return _FLOAT.unpack(self._take_bytes(8))[0]
        (length,) = _LENGTH.unpack(self._take_bytes(8))
        if tag == b"x":
            if length >= len(self.tensors):
                raise MalformedState(f"there is no tensor {length}")
            return self.tensors[length]
        for kind, known in _SEQUENCES.items():
            if tag == known:
                return kind([self.read(depth + 1) for _ in range(self._check_count(length, 1))])
        for kind, known in _MAPPINGS.items():
            if tag == known:
                return self._read_mapping(kind, self._check_count(length, 2), depth)
        return self._read_scalar(tag, self._take_bytes(length))

    def _read_mapping(self, kind: Callable[[], Any], length: int, depth: int) -> Any:
        found = kind()
        for _ in range(length):
            key = self.read(depth + 1)
            if not _is_key(key):
                raise MalformedState(f"a {type(key).__name__} can't be a key")
            if key in found:
                raise MalformedState(f"the key {key!r} is there twice")
            found[key] = self.read(depth + 1)
        return found

    def _read_scalar(self, tag: bytes, data: bytes) -> Any:
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

    def _check_count(self, length: int, each: int) -> int:
        """A number of items that the bytes left may hold: nothing is made for a false one."""
        if length * each > len(self.data) - self.position:
            raise MalformedState(f"{length} items, and {len(self.data) - self.position} bytes")
        return length

    def _take_bytes(self, length: int) -> bytes:
        end = self.position + length
        if end > len(self.data):
            raise MalformedState(f"the value ends {end - len(self.data)} bytes early")
        taken, self.position = self.data[self.position : end], end
        return taken


def _is_key(key: Any) -> bool:
    return all(type(part) in _KEYS for part in (key if type(key) is tuple else (key,)))


def _spell_path(path: tuple[Any, ...]) -> str:
    return str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])
