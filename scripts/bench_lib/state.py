"""`scripts/bench state`: commit, restore and sync of 1 GB beside memcpy, deepcopy and torch.save.

Each is the median of several; a ratio is to memcpy (ctypes.memmove) of the same bytes into memory
that is there already. Sync is between two processes of this machine, over gloo.
"""

import argparse
import copy
import ctypes
import io
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console

from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.replicas import digests_of

from .figures import grid

WIDTH = 1024


def trained(megabytes: float, device: str = "cpu") -> ElasticState:
    """A transformer's shapes with Adam's moments: megabytes in all, large tensors and small."""
    block = 12 * WIDTH * WIDTH * 4 * 3  # bytes of a layer with its moments, about
    layers = [
        torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, device=device)
        for _ in range(max(1, round(megabytes * 1e6 / block)))
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return ElasticState(model=model, optimizer=optimizer, epoch=0)


def dicts(state: ElasticState) -> tuple[object, object]:
    return state.model.state_dict(), state.optimizer.state_dict()


def size_of(state: ElasticState) -> int:
    moments = [t for row in state.optimizer.state.values() for t in row.values()]
    return sum(t.numel() * t.element_size() for t in (*state.model.state_dict().values(), *moments))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median seconds of each; they take turns, so that a busy machine is busy for all."""
    rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(repeat)]
    return {name: statistics.median(took[name] for took in rounds) for name in ways}


def checks(state: ElasticState, calls: int = 10_000) -> float:
    """Seconds of one check()."""
    start = time.perf_counter()
    for _ in range(calls):
        state.check()
    return (time.perf_counter() - start) / calls


def local(megabytes: int, repeat: int) -> tuple[int, dict[str, float]]:
    """The size in bytes, and what each way takes."""
    state = trained(megabytes)
    size = size_of(state)
    memory = [torch.ones(size, dtype=torch.uint8) for _ in range(2)]
    first = seconds(state.commit)
    state.commit()
    _, by_name = state._save_values()  # noqa: SLF001
    tensors = [*by_name.values()]
    found = in_turn(
        {
            "memcpy": lambda: ctypes.memmove(memory[0].data_ptr(), memory[1].data_ptr(), size),
            "Tensor.copy_": lambda: memory[0].copy_(memory[1]),
            "commit": state.commit,
            "restore": state.restore,
            "digest, to compare replicas": partial(digests_of, tensors),
        },
        repeat,
    )
    memory.clear()
    found["commit, the first"] = first
    with TemporaryDirectory(dir="/dev/shm") as folder:  # no disk
        path = Path(folder) / "state"
        ways: dict[str, Callable[[], object]] = {
            "save": lambda: state.save(path),
            "save, beside the training": lambda: state.save(path, wait=False),
            "load": lambda: state.load(path),
        }
        found |= in_turn(ways, 2)
        state.save(path)  # waits for the one that a thread does
    found |= in_turn(
        {
            "copy.deepcopy": lambda: copy.deepcopy(dicts(state)),
            "torch.save, to memory": lambda: torch.save(dicts(state), io.BytesIO()),
        },
        repeat,
    )
    return size, found | {"check": checks(state)}


def peer(rank: int, folder: Path, megabytes: int, repeat: int) -> None:
    """One of two ranks: rank 1 comes new to each sync."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    state = trained(megabytes)
    state.sync()
    flat = torch.ones(size_of(state), dtype=torch.uint8)
    before: dict[str, Callable[[], object]] = {
        "sync, a newcomer": lambda: forget(state) if rank == 1 else None,
        "sync, nothing to send": lambda: None,
        # What check() says of a planned change.
        "sync, after a planned change": lambda: setattr(state, "_at_commit", True),
        "broadcast of one tensor": lambda: None,
    }
    took: dict[str, list[float]] = {name: [] for name in before}
    for _ in range(repeat):
        state.commit()
        for name, prepare in before.items():
            prepare()
            dist.barrier()
            last = name.startswith("broadcast")
            took[name].append(seconds(partial(dist.broadcast, flat, 0) if last else state.sync))
    if rank == 1:
        for name, found in took.items():
            print(f"{name}\t{statistics.median(found)}")
    dist.barrier()
    dist.destroy_process_group()


def forget(state: ElasticState) -> None:
    """As a worker that begins: its memory is there, and nothing in it."""
    for memfd in state._snapshots.own:  # noqa: SLF001
        memfd.clear()


def between(megabytes: int, repeat: int) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.bench_lib.state", "--megabytes", str(megabytes)]
    command += ["--repeat", str(repeat)]
    with TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [*command, "--folder", folder, "--rank", str(rank)],
                stdout=subprocess.PIPE if rank else None,
                text=True,
            )
            for rank in (0, 1)
        ]
        return told(ranks, 1)


def told(ranks: list[subprocess.Popen[str]], by: int) -> dict[str, float]:
    """Names and numbers as the rank `by` prints them, when all ranks have ended."""
    try:
        output, _ = ranks[by].communicate(timeout=timedelta(minutes=10).total_seconds())
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    return {name: float(number) for name, number in (x.split("\t") for x in output.splitlines())}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench state", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        peer(args.rank, args.folder, args.megabytes, args.repeat)
        return 0
    size, found = local(args.megabytes, args.repeat)
    found |= between(args.megabytes, args.repeat)
    threads = torch.get_num_threads()
    title = (
        f"state of {size / 1e9:.2f} GB: torch {torch.__version__}, {threads} of {os.cpu_count()}"
    )
    rows = [(name, f"{t:.3g}", f"{t / found['memcpy']:.3g}") for name, t in found.items()]
    columns = ("", "seconds", "x memcpy")
    Console(width=100).print(grid(f"{title} cores, medians of {args.repeat}", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
