"""Before a commit all ranks ask each other: whether their world is whole, and all are at it.

A lost peer is known by the agent's word, or by the error of a collective. That error may have been
caught by the script, to skip a batch. So each commit asks the group that has met it, by one
all_gather of a few numbers, which costs about as much as the smallest all_reduce.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_etcd.errors import UsageError
from elastic_etcd.train import sync_point
from elastic_etcd.train.abort import nccl_error
from elastic_etcd.train.accelerator import devices
from elastic_etcd.train.collectives import gather, rank_and_size

# Of this world, by each optimizer of the process.
_steps: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def _count(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        _steps[optimizer] = _steps.get(optimizer, 0) + 1


register_optimizer_step_post_hook(_count)


def begin() -> None:
    """A world begins: all ranks have the same values, and count from here on."""
    _steps.clear()


def steps_of(values: Iterable[Any]) -> int:
    """How many steps the optimizers among these values have taken in this world."""
    return sum(_steps.get(value, 0) for value in values if isinstance(value, Optimizer))


def agree(commit: int, steps: int, others: Sequence[int] = ()) -> list[list[int]]:
    """Every rank's `others`, once all have come to the same commit. Collective.

    commit: its number; steps: those of optimizers until it, in this world. Raises WorldBroken, on
    all ranks, if one has others or if a collective has failed, here or on another rank; without
    ee.run it raises the error itself.
    """
    point = sync_point.current()
    point.raise_if_broken()
    if devices().is_initialized():
        devices().current_stream().synchronize()  # one that has left out a collective gets on
    _, size = rank_and_size(launched=False)
    if size == 1:
        return [list(others)]
    try:
        if error := nccl_error():
            raise RuntimeError(f"NCCL error: {error}")  # noqa: TRY301 - as the next line does
        rows = gather([commit, steps, *others])
    except RuntimeError as error:
        point.raise_if_broken()
        what = "a collective has failed, here or on another rank, so nothing is committed"
        sync_point.lose(what, error)
    if len({(commit, steps) for commit, steps, *_ in rows}) > 1:
        what = "not all ranks have taken the same steps, so nothing is committed"
        sync_point.lose(what, UsageError(_apart(rows)))
    return [row[2:] for row in rows]


def _apart(rows: Sequence[Sequence[int]]) -> str:
    """Which ranks are apart from the others, in words."""
    places = [tuple(row[:2]) for row in rows]
    usual = max(places, key=lambda place: (places.count(place), place))
    rank = next(rank for rank, place in enumerate(places) if place != usual)
    of_all = [f"commit {commit} after {steps} steps" for commit, steps in (places[rank], usual)]
    return (
        f"rank {rank} is at {of_all[0]} of its optimizers, others at {of_all[1]}. Has it caught an "
        "exception that the others have not met? commit() is for all ranks, at the same step"
    )
