"""Sharded tensors of torch (DTensor) as pieces, and pieces as sharded tensors."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from elastic_etcd.errors import UsageError
from elastic_etcd.system.kernel import populate
from elastic_etcd.train.sharded.pieces import Piece

_MOMENT = re.compile(r"(\w+)\.state\.(\d+)\.(.+)")


# Shapes and offsets, by shape, mesh and placements: as long as a copy of half a megabyte takes. A
# mesh of another world may be equal to this one's: `Built` forgets them.
place_of = cache(compute_local_shape_and_global_offset)


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return isinstance(tensor, DTensor)


def piece_of(name: str, tensor: DTensor) -> Piece:
    """The piece that this rank has. Raises UsageError for one that is not a box of the whole."""
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UsageError(f"{name} is a partial sum, which is no value to be kept: reduce it first")
    shape, offset = place_of(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(local_of(tensor).shape) != tuple(shape):
        raise UsageError(f"{name} is sharded unevenly in a way that torch does not describe")
    return Piece(name, tuple(offset), tuple(shape))


def local_of(tensor: DTensor) -> torch.Tensor:
    """The memory of this rank's piece."""
    with torch.no_grad():  # else each call is a step of autograd's
        return tensor.to_local()


def sharded_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A tensor that is sharded as this one is, with another piece."""
    return DTensor.from_local(
        local.to(local_of(tensor).device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def memory_for(name: str, model: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory of this machine for this rank's piece of that dtype, to be written.

    The parameter's own, where it is to be loaded into that: then loading it copies nothing.
    """
    own = local_of(model)
    if _MOMENT.fullmatch(name) or own.dtype != dtype or not (own.is_cpu and own.is_contiguous()):
        own = torch.empty(own.shape, dtype=dtype, device="cpu")
    populate(own.data_ptr(), own.nbytes)
    return own


def models_of(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, DTensor]:
    """By the name of each sharded tensor of a snapshot one that is sharded as it is to be.

    A moment of an optimizer is sharded as its parameter. Raises UsageError for all others.
    """
    found = dict(_of_modules(values))
    models = {}
    for name in names:
        match = _MOMENT.fullmatch(name)
        parameter = _parameter(values, match[1], int(match[2])) if match else found.get(name)
        if not is_sharded(parameter):
            raise UsageError(
                f"{name} was sharded at the last commit, and `build` makes nothing of that name "
                "that is sharded now"
            )
        models[name] = parameter
    return models


def targets_of(
    values: Mapping[str, Any], names: Mapping[str, tuple[str, list[int]]]
) -> dict[str, DTensor]:
    """The same by dtype and shape of each. Raises UsageError also for one of another shape."""
    models = models_of(values, names)
    for name, (_, shape) in names.items():
        if list(models[name].shape) != shape:
            raise UsageError(f"{name} was of {shape} and is of {list(models[name].shape)} now")
    return models


def refuse_homeless(values: Mapping[str, Any], shards: Mapping[str, DTensor]) -> None:
    """Raise UsageError for a tensor that could not be sharded for another world."""
    for name, model in models_of(values, shards).items():
        if model.shape != shards[name].shape:
            raise UsageError(
                f"{name} has the shape {list(shards[name].shape)}, its parameter "
                f"{list(model.shape)}: how it is to be sharded for another world is not known"
            )


def _of_modules(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                yield f"{name}.{key}", tensor


def _parameter(values: Mapping[str, Any], name: str, number: int) -> Any:
    optimizer = values.get(name)
    if not isinstance(optimizer, Optimizer):
        return None
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return parameters[number] if number < len(parameters) else None
