"""Who this process is among the ranks, and numbers that all of them tell each other."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class World(NamedTuple):
    """One of the worlds that this process has trained in."""

    generation: int
    rank: int
    world_size: int


def rank_and_size(*, launched: bool = True) -> tuple[int, int]:
    """Rank and world size of the default process group; (0, 1) where there is none.

    launched: before there is one, believe RANK and WORLD_SIZE.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if launched and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def gather(numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Every rank's numbers, in rank order; collective on `group`. All ranks give as many."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group)
    return [row.tolist() for row in gathered]


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the process group takes tensors; None: the default one.

    One that takes host memory and a GPU's, as "cpu:gloo,cuda:nccl", is given host memory.
    """
    if "cpu" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
