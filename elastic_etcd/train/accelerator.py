"""The devices that this process trains on, by torch.accelerator where torch has it (from 2.6 on).

NVIDIA's and AMD's are "cuda"; others, such as "xpu", have a name and a module of torch's their own.
"""

from typing import Any

import torch

_BACKENDS = ("nccl", "xccl")  # torch's own that take tensors of these devices only


def kind() -> str:
    """The type of these devices: "cuda" also where there are none."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return found.type if found else "cuda"


def devices() -> Any:
    """Torch's module for them: torch.cuda, or one that is like it."""
    return getattr(torch, kind())


def uses_devices(backend: str) -> bool:
    """Whether a process group of such a backend, like "cpu:gloo,cuda:nccl", is for these."""
    return any(name in backend.lower() for name in _BACKENDS)


def current_device() -> torch.device:
    """The one of this process."""
    return torch.device(kind(), devices().current_device())
