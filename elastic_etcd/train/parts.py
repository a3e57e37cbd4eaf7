"""How each kind of value in a state is saved and loaded: one codec for each type."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_etcd.errors import UsageError


class Codec(Protocol):
    """Makes plain values and tensors of a value of one type, and puts them back.

    `save(value)` returns what `encoding.encode` takes; its tensors are read before commit()
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
    """Values that are plain themselves, tensors among them; replaced, never changed in place."""

    def save(self, value: Any) -> Any:
        return value

    def load(self, value: Any, saved: Any) -> Any:  # noqa: ARG002 - the protocol's
        return saved


class _StateDict:
    def save(self, value: Any) -> Any:
        return value.state_dict()

    def load(self, value: Any, saved: Any) -> Any:
        value.load_state_dict(saved)
        return value


class _Module:
    """A module's own parameters and buffers: whether it is wrapped makes no difference."""

    borrows = True

    def save(self, value: Any) -> Any:
        return dict(_bare(value).state_dict())

    def load(self, value: Any, saved: Any) -> Any:
        _bare(value).load_state_dict(saved)
        return value


class _Optimizer(_StateDict):
    """Loads into the optimizer's own tensors where they fit, which saves making new ones."""

    borrows = True

    def load(self, value: Any, saved: Any) -> Any:
        return super().load(value, _into(value.state_dict(), saved, set()))


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


class Clones(Sequence[torch.Tensor]):
    """A snapshot's tensors, each copied when it is asked for, to where it came from."""

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


def _bare(module: Any) -> Any:
    """The module that the user wrote, out of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # noqa: SLF001 - torch.compile has no public name for it
            module = module._orig_mod  # noqa: SLF001
        else:
            return module


def _into(live: Any, saved: Any, taken: set[int]) -> Any:
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
        return {key: _into(known.get(key), value, taken) for key, value in saved.items()}
    if type(saved) in {list, tuple}:
        lives = live if isinstance(live, (list, tuple)) and len(live) == len(saved) else ()
        items = zip(saved, lives or (None,) * len(saved), strict=True)
        return type(saved)(_into(item, value, taken) for value, item in items)
    return saved
