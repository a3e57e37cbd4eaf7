"""What is NCCL's own: the device, errors that must not end the process, and the abort.

Written against torch 2.4 to 2.13; what differs between them is asked for by name.
"""

# ruff: noqa: SLF001 - torch has no public name for any of it

import os
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist


def usable() -> bool:
    """Whether this process trains on NVIDIA devices."""
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def prepare(local_rank: int) -> None:
    """Make this worker's device the current one, before the process group is made."""
    torch.cuda.set_device(local_rank)


def leave_errors_to_us() -> None:
    """Before the process group is made: the watchdog would end the process at the first error."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def abort(done: list[Any]) -> None:
    """End what runs on this worker's communicators, so that no thread waits for them.

    `done` are backends that have been aborted before; the others are added. All at once, since
    one by one can deadlock (pytorch#119797).
    """
    backends = [backend for backend in _backends() if backend not in done]
    done += backends
    grouped = backends and hasattr(backends[0], "_group_start")
    if grouped:
        backends[0]._group_start()
    for backend in backends:
        end = getattr(backend, "abort", None) or backend._shutdown  # torch < 2.6
        end()
    if grouped:
        backends[0]._group_end()


def _backends() -> list[Any]:
    if not (usable() and dist.is_initialized()):
        return []
    found = []
    for group in tuple(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # this group has nothing for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found
