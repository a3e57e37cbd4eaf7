"""The structure of values: what a process that starts anew makes before it loads a snapshot.

A process notes it before its first sync. A commit of values with another one would end the job at
the next loss or join, in the newcomer, and is refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from elastic_etcd.errors import UsageError
from elastic_etcd.train.state import codecs
from elastic_etcd.train.state.encoding import without_modes

_ANEW = "a process that starts anew could not load it"


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class Structure(NamedTuple):
    """The structure of a value."""

    kind: str  # what it is saved as
    wrapped: bool = False  # in DistributedDataParallel
    tensors: Mapping[str, _Tensor] = {}  # of a module, by their names
    groups: tuple[int, ...] = ()  # of an optimizer: parameters in each


def structures_of(values: Mapping[str, Any]) -> dict[str, Structure]:
    """The structure of each value."""
    return {name: _structure_of(value) for name, value in values.items()}


def refuse_changed(noted: Mapping[str, Structure], values: dict[str, Any]) -> None:
    """Raise UsageError, with what to do, if a value is not of the structure that was noted."""
    for name, value in values.items():
        before, now = noted[name], _structure_of(value)
        if now == before:
            continue
        if now.wrapped > before.wrapped:
            raise UsageError(
                f"{name} is a DistributedDataParallel, which belongs to one world: keep the module "
                "itself in the state and the DistributedDataParallel in a variable of the training "
                "function, or wrap it once, outside of it, by ee.ddp"
            )
        if now.kind != before.kind:
            raise UsageError(
                f"{name} was {before.kind} at the first sync and is {now.kind} now: {_ANEW}. Make "
                "it before the first sync, and give it to ElasticState from the start"
            )
        if why := _why_other_tensors(name, before.tensors, now.tensors):
            raise UsageError(why)
        if now.groups != before.groups and not codecs.knows_parameters(value, values):
            raise UsageError(
                f"{name} has param groups of {_listed(now.groups)} parameters, and had those of "
                f"{_listed(before.groups)} at the first sync: {_ANEW}. Give ElasticState the "
                "module that has these parameters, so that groups can be made by their names, or "
                "make all groups before the first sync"
            )


def _structure_of(value: Any) -> Structure:
    if isinstance(value, torch.nn.Module):
        module = codecs.unwrapped(value)
        copied = {*codecs.copied_names(module)}
        tensors = module.state_dict().items()
        known = [(name, each) for name, each in tensors if name in copied and not is_lazy(each)]
        with without_modes():
            noted = {name: _Tensor(tuple(each.shape), each.dtype) for name, each in known}
        return Structure("a module", codecs.is_wrapped(value), noted)
    if isinstance(value, torch.optim.Optimizer):
        groups = tuple(len(group["params"]) for group in value.param_groups)
        return Structure(_named(_bare(value)), groups=groups)
    codec = codecs.codec_of(value)
    return Structure("a plain value" if codecs.is_plain(codec) else _named(_bare(value)))


def _why_other_tensors(name: str, before: Mapping[str, _Tensor], now: Mapping[str, _Tensor]) -> str:
    for tensor, (shape, dtype) in now.items():
        was = before.get(tensor)
        if was is None:
            return (
                f"{name}.{tensor} was not there at the first sync: {_ANEW}. Make it before that, "
                "or register a buffer with persistent=False"
            )
        if was.shape != shape:
            return (
                f"{name}.{tensor} has the shape {list(shape)}, and had {list(was.shape)} at the "
                f"first sync: {_ANEW}. Give it its full size from the start, or register a buffer "
                "with persistent=False"
            )
        if was.dtype != dtype:
            return (
                f"{name}.{tensor} is of {dtype}, and was of {was.dtype} at the first sync, as in a "
                "process that starts anew, which would keep other values. Give it this type before "
                "that, or register a buffer with persistent=False"
            )
    gone = next((tensor for tensor in before if tensor not in now), None)
    if gone is None:
        return ""
    return f"{name}.{gone} was there at the first sync and is not any more: {_ANEW}. Keep it"


def _bare(value: Any) -> Any:
    """The user's own optimizer or scheduler, out of accelerate's."""
    inner = getattr(value, "optimizer", None) or getattr(value, "scheduler", None)
    if type(value).__module__.startswith("accelerate.") and inner is not None:
        return inner
    return value


def _named(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}"


def _listed(groups: tuple[int, ...]) -> str:
    return ", ".join(map(str, groups)) or "no"
