"""This process's place in the world, and small agreements with the others."""

import os

import torch
import torch.distributed as dist


def place() -> tuple[int, int]:
    """Rank and world size: from torch.distributed, else from RANK and WORLD_SIZE, else (0, 1)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def gather(number: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Every rank's number, in rank order: a collective on `group`, on the GPU for NCCL."""
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    mine = torch.tensor([number], device=device)
    numbers = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, mine, group)
    return [int(n) for n in numbers]
