"""`scripts/gpu-test --bench`: what recovery and commits cost where training is on a GPU.

Recovery is a killed worker of two nodes of one worker each, both on one GPU, beside torchrun's of
the same run. A commit stands beside a plain copy of the same tensors to the
host: into page-locked memory that is there already, which is the fastest that there is.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from elastic_etcd.etcd.embedded import EmbeddedEtcd
from tests.support.places import PLACES, Place, first_gpu, missing, nccl_version

from . import faults, launchers, state
from .figures import Sample, grid

NOT_HERE = 77
PLAIN = "plain copy, into memory that is there"
TORCHRUN = "torchrun c10d"
BOUND = 60.0  # seconds after which it has not recovered
METHODS = ("exec", "prefork", "in process")


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no job outlives the benchmark
    if why := missing(Place(args.device, "gloo"), ranks=2, one_gpu=True):
        print(f"{why}; --device cpu tries the benchmark itself", file=sys.stderr)
        return NOT_HERE
    console = Console(width=max(130, Console().width))
    console.print(f"{machine(args.device)}; load {os.getloadavg()[0]:.1f} before")
    if args.only != "recovery":
        commits(args, console)
    if args.only != "commit":
        asyncio.run(recovery(args, console))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-test --bench", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", choices=["commit", "recovery"])
    # NCCL by itself is what ee.run has beside gloo.
    parser.add_argument("--place", choices=["cuda-gloo", "cuda-both", "cpu-gloo"], action="append")
    parser.add_argument("--sizes", default="1,10,40", help="of the state, in GB")
    parser.add_argument("--repeat", type=int, default=3, help="commits of each size")
    parser.add_argument("--kills", type=int, default=5, help="of each start method and backend")
    args = parser.parse_args()
    args.place = args.place or ["cpu-gloo", "cuda-gloo", "cuda-both"]
    return args


def machine(device: str) -> str:
    """For the title of the figures."""
    here = f"torch {torch.__version__}, {os.cpu_count()} cores"
    if device == "cpu":
        return f"CPU, {here}"
    version = ".".join(map(str, nccl_version()))
    name = torch.cuda.get_device_name()
    return (
        f"{torch.cuda.device_count()} x {name}, CUDA {torch.version.cuda}, NCCL {version}, {here}"
    )


# --- commits


def commits(args: argparse.Namespace, console: Console) -> None:
    rows = []
    for size in map(float, args.sizes.split(",")):
        if why := lacking(args.device, size * 1e9):
            console.print(f"{size:g} GB are left out: {why}")
        else:
            rows += measured(args.device, size, args.repeat)
    columns = ("", "seconds", "GB/s", "x plain copy")
    console.print(grid(f"a state on {args.device}, medians of {args.repeat}", columns, rows))


def measured(device: str, size: float, repeat: int) -> list[tuple[str, ...]]:
    """The rows for a state of so many GB."""
    made = state.trained(size * 1e3, device)
    tensors = [t for values in state.dicts(made) for t in _tensors(values)]
    there = sum(t.nbytes for t in tensors)
    largest = max(t.nbytes for t in tensors)
    host = torch.empty(largest, dtype=torch.uint8, pin_memory=device == "cuda")
    first = state.seconds(made.commit)
    made.commit()
    found = state.in_turn(
        {
            PLAIN: lambda: copy_all(tensors, host),
            "plain copy, into new memory": lambda: clone_all(tensors),
            "commit": made.commit,
            "restore": lambda: finished(made.restore, device),
        },
        repeat,
    )
    return [
        (
            f"{name}, {there / 1e9:.2f} GB",
            f"{s:.3g}",
            f"{there / s / 1e9:.3g}",
            f"{s / found[PLAIN]:.3g}",
        )
        for name, s in (found | {"commit, the first": first}).items()
    ]


def _tensors(values: object) -> list[torch.Tensor]:
    """All in a state dict, however deep."""
    if isinstance(values, torch.Tensor):
        return [values]
    inside = values.values() if isinstance(values, dict) else ()
    return [tensor for each in inside for tensor in _tensors(each)]


def copy_all(tensors: list[torch.Tensor], host: torch.Tensor) -> None:
    """Each into the same memory of the host, one after the other without a pause."""
    for tensor in tensors:
        host[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1), non_blocking=True)
    synchronize(tensors[0].device.type)


def clone_all(tensors: list[torch.Tensor]) -> None:
    """Each into memory of its own, that is given back at once."""
    for tensor in tensors:
        torch.empty_like(tensor, device="cpu").copy_(tensor)


def finished(call: Callable[[], object], device: str) -> None:
    """With what it has queued on the device."""
    call()
    synchronize(device)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def lacking(device: str, size: float) -> str:
    """Why there is no room for a state of so many bytes; "" if there is."""
    # Two snapshots, and what is copied beside them.
    wanted, free = 2.2 * size, host_memory()
    if device == "cpu":
        wanted += 3 * size
    elif (free_there := torch.cuda.mem_get_info()[0]) < 2 * size:  # with gradients, for a step
        return f"{2 * size / 1e9:.1f} GB of the GPU are needed, {free_there / 1e9:.1f} are free"
    if free < wanted:
        return f"{wanted / 1e9:.1f} GB of the host are needed, {free / 1e9:.1f} are free"
    return ""


def host_memory() -> float:
    """Bytes that this process may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvail"))
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text())
        return min(free, most - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # another kind of cgroup, or no limit
        return free


# --- recovery


async def recovery(args: argparse.Namespace, console: Console) -> None:
    async with EmbeddedEtcd() as etcd:
        for place in PLACES:
            if place.device != args.device or str(place) not in args.place:
                continue
            if why := missing(place, ranks=2, one_gpu=True):
                console.print(f"{place} is left out: {why}")
            else:
                show(place, etcd.endpoint, args.kills, console)


def show(place: Place, endpoint: str, kills: int, console: Console) -> None:
    """Each launcher's milliseconds; of torchrun one."""
    rows = []
    for name in (*METHODS, TORCHRUN):
        ours = name in METHODS
        plain = launchers.elastic(name, endpoint) if ours else launchers.c10d()
        script = (*plain.script, "--device", place.device, "--backend", place.backend)
        launcher = replace(plain, script=script, environment=place.env | first_gpu())
        took = [killed(launcher) for _ in range(kills if ours else 1)]
        times = [1e3 * each for each in took if not isinstance(each, str)]
        said = [each for each in took if isinstance(each, str)]
        middle = f"{median(times):.0f} ({min(times):.0f}-{max(times):.0f})" if times else ""
        rows.append((name, " ".join([middle, *said]).strip()))
    title = f"worker SIGKILLed, {place}: ms to the next step, medians of {kills} kills"
    console.print(grid(title, ("", "ms"), rows))


def killed(launcher: launchers.Launcher) -> Sample:
    """Seconds of one recovery, in a job of its own; or why there is none."""
    found: dict[str, Sample] = {}
    with suppress(RuntimeError):  # the others' figures are still wanted
        faults.suffer(launcher, faults.WORKER, BOUND, 0.0, found.__setitem__)
    return found.get(faults.WORKER.measure.name, "no start")


if __name__ == "__main__":
    sys.exit(main())
