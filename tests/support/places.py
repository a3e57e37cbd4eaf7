"""Where training runs in these tests, and what is missing for it here."""

import ctypes
import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from _pytest.mark.structures import ParameterSet

BOTH = "cpu:gloo,cuda:nccl"  # what ee.run chooses where there are GPUs
SEVERAL = (2, 30)  # the first NCCL that takes several ranks on one GPU


@dataclass(frozen=True)
class Place:
    """A device's type, and the backend of the process group."""

    device: str
    backend: str

    def __str__(self) -> str:
        """As a test's id."""
        return f"{self.device}-{'both' if self.backend == BOTH else self.backend}"

    @property
    def env(self) -> dict[str, str]:
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if "nccl" in self.backend else {}

    def take(self, rank: int) -> torch.device:
        """This process's device, now its current one."""
        os.environ.update(self.env)
        if self.device == "cpu":
            return torch.device("cpu")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device


PLACES = (
    Place("cpu", "gloo"),
    Place("cuda", "gloo"),
    Place("cuda", "nccl"),
    Place("cuda", BOTH),
)


def places(ranks: int, *, one_gpu: bool = False) -> list[ParameterSet]:
    """All places, as parameters of a test of so many ranks; what can't be here is skipped."""
    return [
        pytest.param(place, id=str(place), marks=pytest.mark.skipif(bool(why), reason=why or "-"))
        for place in PLACES
        for why in [missing(place, ranks, one_gpu=one_gpu)]
    ]


def devices() -> list[ParameterSet]:
    """The CPU and a GPU, for tests of one process."""
    return places(ranks=1)[:2]


def missing(place: Place, ranks: int, *, one_gpu: bool) -> str:
    """Why so many ranks can't be there; "" if they can."""
    if place.device == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds none"
    if "nccl" not in place.backend:
        return ""
    if not dist.is_nccl_available():
        return f"no NCCL: torch {torch.__version__} was built without it"
    gpus = 1 if one_gpu else torch.cuda.device_count()
    found = nccl_version()
    if ranks <= gpus or found >= SEVERAL:
        return ""
    return (
        f"NCCL {'.'.join(map(str, found))} takes one rank on each GPU, and here are {ranks} ranks "
        f"for {gpus}; 2.30 takes several (scripts/gpu-test --help)"
    )


def nccl_beside_gloo(ranks: int, *, one_gpu: bool = False) -> Place:
    """For a test of that alone, which is skipped where it can't be."""
    place = Place("cuda", BOTH)
    if why := missing(place, ranks, one_gpu=one_gpu):
        pytest.skip(why)
    return place


def nccl_version() -> tuple[int, ...]:
    """Of the NCCL that is loaded. It need not be the one that torch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is a part of torch's own library
        return tuple(torch.cuda.nccl.version()[:3])
    major, rest = divmod(number.value, 10_000)  # since NCCL 2.9
    return major, rest // 100, rest % 100


def first_gpu() -> dict[str, str]:
    """The environment in which there is one GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0]}
