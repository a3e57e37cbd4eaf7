"""How values are saved and loaded: a codec stands for a type, and makes plain values of its own.

encoding.py makes JSON of plain values and keeps their tensors apart.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_etcd.errors import UsageError
from elastic_etcd.train.ddp import is_reduced, reduce_next
from elastic_etcd.train.state.encoding import MAX_DEPTH, decode, encode, without_modes


class Codec(Protocol):
    """Makes plain values and tensors of a value of one type, and puts them back.

    `save(value)` returns a value that `encode` takes; its tensors are read before commit()
    returns, so they may be the live ones. `load(value, saved)` returns the attribute's value from
    then on, which may be `value`, changed. The tensors in `saved` are the codec's to keep, unless
    it has `borrows = True`: then they are the snapshot itself, to be copied and never changed.
    """

    def save(self, value: Any) -> Any: ...

    def load(self, value: Any, saved: Any) -> Any: ...


@runtime_checkable
class Stateful(Protocol):
    """A value that is saved by its state_dict: a scheduler, a sampler, many others."""

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
    """A module's own tensors and modes: whether it is wrapped makes no difference.

    Its modes are which of its modules evaluate and which of its parameters are frozen, and which
    of these DistributedDataParallel reduces: a peer may be lost in an evaluation, or while a GAN's
    other half is trained.
    """

    borrows = True

    def save(self, value: Any) -> Any:
        module = unwrapped(value)
        saved = copy(module.state_dict())
        frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
        saved[MODES] = {
            "eval": [name for name, each in module.named_modules() if not each.training],
            "frozen": list(frozen),
            "reduced": [name for name, each in frozen.items() if is_reduced(each)],
        }
        return saved

    def load(self, value: Any, saved: Any) -> Any:
        module = unwrapped(value)
        match saved.pop(MODES, None):
            case {"eval": [*evaluating], "frozen": [*parameters], "reduced": [*others]}:
                evaluates, frozen = {*map(str, evaluating)}, {*map(str, parameters)}
                reduced = {*map(str, others)}
                for name, each in module.named_modules():
                    each.training = name not in evaluates
                for name, each in module.named_parameters():
                    each.requires_grad = name not in frozen
                    reduce_next(each, wanted=name in reduced)
        copied, copies = set(copied_names(module)), _Copies()
        for name in saved.keys() - copied:
            saved[name] = copies.into(None, saved[name])
        module.load_state_dict(saved)
        return value


class _Optimizer(_StateDict):
    """Loads into the optimizer's own tensors where they fit, which saves making new ones.

    load_state_dict casts a parameter's state to the parameter's type: float32 moments of a bfloat16
    parameter would lose half of their bits each time. The tensors that were cast are put back.
    """

    borrows = True

    def load(self, value: Any, saved: Any) -> Any:
        owned = _Copies().into(value.state_dict(), saved)
        value.load_state_dict(owned)
        state, groups = owned.get("state", {}), owned.get("param_groups", ())
        found: _Found = {}
        for ours, theirs in zip(value.param_groups, groups, strict=False):
            for parameter, number in zip(ours["params"], theirs["params"], strict=False):
                if parameter in value.state and number in state:
                    value.state[parameter] = _uncast(value.state[parameter], state[number], found)
        return value


class _Scaler(_StateDict):
    """Also forgets a step that was not finished, which no state_dict has."""

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


GROUPS = ".groups"  # beside an optimizer's own: the names of each group's parameters
MODES = ".modes"  # beside the names of a module's tensors, none of which begins with a dot
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


def refuse_sharded(name: str, value: Any) -> None:
    """Raise UsageError, with what to do, if each rank holds another part of the value.

    A state gives all ranks the same. It looks at types only, so that all ranks find it alike.
    """
    for part in _parts_of(value):
        if kind := _sharded_kind(part.__class__):
            raise UsageError(f"{name} has a {kind}: {_SHARDED[kind]}")


def refuse_trained(place: str, value: Any, depth: int = MAX_DEPTH) -> None:
    """Raise UsageError, with what to do, if a plain value is or has a tensor that is trained.

    A load would replace that, and an optimizer keep the old one.
    """
    if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
        raise UsageError(
            f"{place} is trained: as a plain value it would be replaced when it is loaded, and not "
            "loaded into. Put it into a module, or detach it if it is no parameter of an optimizer"
        )
    if isinstance(value, (dict, list, tuple)) and depth:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            refuse_trained(f"{place}[{key!r}]", item, depth - 1)


@cache
def _sharded_kind(kind: type) -> str:
    """The name of its base that is sharded, "" if none is; asked for each parameter at a commit."""
    bases = (
        b for b in kind.__mro__ if b.__name__ in _SHARDED and b.__module__.startswith("torch.")
    )
    return next((base.__name__ for base in bases), "")


_REPLICAS = (
    "each rank holds another part of it: let ElasticState(build=...) make it for each world, if it "
    "is FSDP2's or HSDP's; else use torch.distributed.checkpoint in a script without ee.run"
)
_SHARDED = {
    **dict.fromkeys(("FullyShardedDataParallel", "FSDPModule", "DTensor"), _REPLICAS),
    "ZeroRedundancyOptimizer": "each rank holds another part of it: use the optimizer that it "
    "shards, such as torch.optim.AdamW",
    "DeviceMesh": "it belongs to one world: make it where training begins, not in the state",
}


def _parts_of(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
        yield from value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        yield from (parameter for group in value.param_groups for parameter in group["params"])


def save_values(
    values: dict[str, Any], *, allow_pickle: bool, shards: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Encode each value by its type's codec; the parts, by its name, and the tensors of all.

    Sharded tensors are put into `shards`, or are refused without it. Raises UsageError.
    """
    tensors: dict[str, torch.Tensor] = {}
    parts = {}
    for name, value in values.items():
        codec = codec_of(value)
        saved = codec.save(value)
        if isinstance(codec, _Optimizer) and (groups := groups_by_names(value, values)):
            saved = {**saved, GROUPS: groups}
        with without_modes():
            parts[name] = encode(
                saved, tensors, name=name, allow_pickle=allow_pickle, shards=shards
            )
    return parts, tensors


def load_values(
    values: dict[str, Any],
    parts: dict[str, Any],
    tensors: Mapping[str, tuple[torch.Tensor, bool]],
    *,
    allow_pickle: bool,
    strict: bool = True,
    modes: bool = True,
    shards: Mapping[str, Any] | None = None,
) -> None:
    """Load into each of `values` the part of its name; none is changed before all are read.

    tensors: views of the snapshot, and whether each was on a GPU. Raises MalformedState, and
    UsageError if `parts` has other names than `values`. Without `strict` that is no error: values
    that have no part stay as they are. Without `modes` those of modules do.
    """
    if strict and parts.keys() != values.keys():
        theirs, ours = ", ".join(parts), ", ".join(values)
        raise UsageError(f"the snapshot is of {theirs}; this state is of {ours}")
    views, clones = {name: tensor for name, (tensor, _) in tensors.items()}, _Clones(tensors)
    loads = []
    for name, value in values.items():
        if name in parts:
            codec = codec_of(value)
            given = views if getattr(codec, "borrows", False) else clones
            saved = decode(parts[name], given, allow_pickle=allow_pickle, shards=shards)
            if not modes and isinstance(saved, dict):
                saved.pop(MODES, None)
            loads.append((name, value, codec, saved))
    for name, value, codec, saved in loads:
        if isinstance(codec, _Optimizer) and (groups := saved.pop(GROUPS, None)):
            _make_groups(value, saved["param_groups"], groups, values)
        values[name] = codec.load(value, saved)


def set_since(values: dict[str, Any], parts: dict[str, Any], *, allow_pickle: bool) -> list[str]:
    """The names of the plain values that are not those of `parts`; tensors are not compared."""
    found = []
    for name, value in values.items():
        if name in parts and is_plain(codec_of(value)):
            try:
                same = encode(value, {}, name=name, allow_pickle=allow_pickle) == parts[name]
            except UsageError:
                same = False
            found += [] if same else [name]
    return found


def is_plain(codec: Codec) -> bool:
    """Whether a value of another kind may take the place of one that is saved by it."""
    return codec is _PLAIN


def knows_parameters(optimizer: Any, values: dict[str, Any]) -> bool:
    """Whether the modules of a state have all parameters of its optimizer."""
    return bool(groups_by_names(optimizer, values))


def groups_by_names(optimizer: Any, values: Mapping[str, Any]) -> list[list[str]]:
    """The names of the parameters in each group; none if the state has no module with one."""
    names = {id(parameter): name for name, parameter in _parameters(values).items()}
    groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    return groups if all(map(all, groups)) else []


def _make_groups(
    optimizer: Any, saved: list[dict[str, Any]], groups: list[list[str]], values: dict[str, Any]
) -> None:
    """Give the optimizer the groups that it had when it was saved, if it has others now."""
    known = _parameters(values)
    if groups == groups_by_names(optimizer, values) or not all(
        name in known for group in groups for name in group
    ):
        return
    optimizer.param_groups.clear()
    for group, names in zip(saved, groups, strict=True):
        optimizer.add_param_group({**group, "params": [known[name] for name in names]})
    there = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in [each for each in optimizer.state if id(each) not in there]:
        del optimizer.state[parameter]


def _parameters(values: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
    return {
        f"{name}.{own}": parameter
        for name, value in values.items()
        if isinstance(value, torch.nn.Module)
        for own, parameter in unwrapped(value).named_parameters()
    }


def buffer_names(values: Mapping[str, Any]) -> set[str]:
    """The names of modules' buffers in a snapshot."""
    return {
        f"{name}.{buffer}"
        for name, value in values.items()
        if isinstance(value, torch.nn.Module)
        for buffer, _ in unwrapped(value).named_buffers()
    }


class _Clones(dict[str, torch.Tensor]):
    """A snapshot's tensors, each copied when it is first asked for, to a GPU if it was on one."""

    def __init__(self, tensors: Mapping[str, tuple[torch.Tensor, bool]]) -> None:
        super().__init__({name: tensor for name, (tensor, _) in tensors.items()})
        self._borrowed = {name: cuda for name, (_, cuda) in tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name)
        if name in self._borrowed:
            cuda = self._borrowed.pop(name) and torch.cuda.is_available()
            tensor = self[name] = tensor.cuda() if cuda else tensor.clone()
        return tensor


def is_wrapped(module: Any) -> bool:
    """Whether there is a DistributedDataParallel around the module that the user wrote."""
    return any(isinstance(each, DistributedDataParallel) for each in _from_outside(module))


def unwrapped(module: Any) -> Any:
    """The module that the user wrote, out of DistributedDataParallel and torch.compile."""
    *_, inner = _from_outside(module)
    return inner


def _from_outside(module: Any) -> Iterator[Any]:
    while True:
        yield module
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:  # noqa: SLF001 - torch.compile has no public name for it
            module = module._orig_mod  # noqa: SLF001
        else:
            return


def copied_names(module: torch.nn.Module) -> Iterator[str]:
    """The names in its state dict whose tensors load_state_dict copies and does not keep.

    Only torch's own loading is known to do so, of parameters and buffers, where no hook sees them.
    """
    modules = list(module.named_modules(remove_duplicate=False))
    if any(each._load_state_dict_pre_hooks for _, each in modules):  # noqa: SLF001
        return
    if not _is_torchs(module, "load_state_dict"):
        return
    for path, each in modules:
        if _is_torchs(each, "_load_from_state_dict"):
            prefix = path + "." if path else ""
            yield from (prefix + name for name in each._parameters.keys())  # noqa: SLF001, SIM118
            yield from (prefix + name for name in each._buffers.keys())  # noqa: SLF001, SIM118


def _is_torchs(module: torch.nn.Module, method: str) -> bool:
    theirs = getattr(torch.nn.Module, method)
    return getattr(getattr(module, method), "__func__", None) is theirs


class _Copies:
    """A snapshot's tensors, copied into live ones or else cloned; each has one copy."""

    def __init__(self) -> None:
        self.made: dict[torch.Tensor, torch.Tensor] = {}
        self.taken: set[int] = set()  # addresses of live ones; of two that share it only one is

    def into(self, live: Any, saved: Any) -> Any:
        """`saved`, its tensors copied into those of `live` at the same place if they fit."""
        if isinstance(saved, torch.Tensor):
            if type(saved).__name__ == "DTensor":  # made for this load
                return saved
            if saved not in self.made:
                self.made[saved] = self._copied(live, saved)
            return self.made[saved]
        if type(saved) in {dict, OrderedDict, Counter}:
            known = live if isinstance(live, Mapping) else {}
            for key, value in saved.items():
                saved[key] = self.into(known.get(key), value)
        elif type(saved) in {list, tuple}:
            lives = live if isinstance(live, (list, tuple)) and len(live) == len(saved) else ()
            items = zip(lives or (None,) * len(saved), saved, strict=True)
            return type(saved)(self.into(item, value) for item, value in items)
        return saved

    def _copied(self, live: Any, saved: torch.Tensor) -> torch.Tensor:
        if not isinstance(live, torch.Tensor) or live.data_ptr() in self.taken:
            return saved.clone()
        if live.shape != saved.shape or live.dtype != saved.dtype:
            return saved.clone()
        self.taken.add(live.data_ptr())
        with torch.no_grad():
            return live.copy_(saved)


_Found: TypeAlias = dict[tuple[torch.Tensor, torch.device], torch.Tensor]


def _uncast(loaded: Any, saved: Any, found: _Found) -> Any:
    """`loaded`, but as it was saved what torch has cast: tensors, texts, sets and kinds of dicts.

    found: by the saved one and its place now, so that one tensor does not become several.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        if loaded.shape != saved.shape:
            return loaded
        cast = loaded.dtype != saved.dtype
        return found.setdefault((saved, loaded.device), saved.to(loaded.device) if cast else loaded)
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        for key, value in loaded.items():
            loaded[key] = _uncast(value, saved.get(key), found)
        kind: Any = type(saved)
        return kind(loaded) if kind in {OrderedDict, Counter} else loaded
    if isinstance(saved, (str, set, frozenset)) and type(loaded) is type(saved):
        return saved  # torch makes a generator of a text, and a text of that
    if type(loaded) in {list, tuple} and type(loaded) is type(saved):
        pairs = zip(loaded, saved, strict=False)
        return type(loaded)(_uncast(value, there, found) for value, there in pairs)
    return loaded
