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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from elastic_etcd.train.state import ElasticState

WIDTH = 1024


def trained(megabytes: int) -> ElasticState:
    """A transformer's shapes with Adam's moments: megabytes in all, large tensors and small."""
    block = 12 * WIDTH * WIDTH * 4 * 3  # bytes of a layer with its moments, about
    layers = [
        torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH)
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


def timed(call: Callable[[], object], repeat: int) -> float:
    """The median of `repeat` calls, in seconds."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def copies(size: int, repeat: int) -> dict[str, float]:
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    places = target.data_ptr(), source.data_ptr()
    return {
        "memcpy": timed(lambda: ctypes.memmove(*places, size), repeat),
        "Tensor.copy_": timed(lambda: target.copy_(source), repeat),
    }


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
    found = copies(size, repeat)
    found["commit, the first"] = timed(state.commit, 1)
    state.commit()
    found["commit"] = timed(state.commit, repeat)
    found["restore"] = timed(state.restore, repeat)
    with TemporaryDirectory(dir="/dev/shm") as folder:  # no disk
        found["save"] = timed(lambda: state.save(Path(folder) / "state"), 2)
        found["load"] = timed(lambda: state.load(Path(folder) / "state"), 2)
    found["copy.deepcopy"] = timed(lambda: copy.deepcopy(dicts(state)), repeat)
    found["torch.save, to memory"] = timed(lambda: torch.save(dicts(state), io.BytesIO()), repeat)
    found["check"] = checks(state)
    return size, found


def peer(rank: int, folder: Path, megabytes: int, repeat: int) -> None:
    """One of two ranks: rank 1 comes new to each sync."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    state = trained(megabytes)
    state.sync()
    seconds: dict[str, list[float]] = {"sync, a newcomer": [], "sync, nothing to send": []}
    seconds["sync, after a planned change"] = []
    flat = torch.ones(size_of(state), dtype=torch.uint8)
    for _ in range(repeat):
        state.commit()
        for name, found in seconds.items():
            if rank == 1 and name == "sync, a newcomer":
                for slot in state._open().slots:  # noqa: SLF001 - as in a worker that begins
                    slot.clear(0)
            if name == "sync, after a planned change":
                state._at_commit = True  # noqa: SLF001 - what check() says of a planned change
            dist.barrier()
            start = time.perf_counter()
            state.sync()
            found.append(time.perf_counter() - start)
    broadcast = timed(lambda: (dist.broadcast(flat, 0), dist.barrier()), repeat)
    if rank == 0:
        dist.barrier()
    else:
        print(f"broadcast of one tensor\t{broadcast}")
        for name, found in seconds.items():
            print(f"{name}\t{statistics.median(found)}")
        dist.barrier()
    dist.destroy_process_group()


def between(megabytes: int, repeat: int) -> dict[str, float]:
    command = [sys.executable, "-m", "bench_lib.state", "--megabytes", str(megabytes)]
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
        try:
            output, _ = ranks[1].communicate(timeout=timedelta(minutes=10).total_seconds())
            codes = [rank.wait(60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise SystemExit(f"the ranks of the sync ended with {codes}")
    return {name: float(took) for name, took in (line.split("\t") for line in output.splitlines())}


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
    table = Table(title=f"{title} cores, medians of {args.repeat}")
    for column in ("", "seconds", "x memcpy"):
        table.add_column(column, justify="right" if column else "left")
    for name, took in found.items():
        table.add_row(name, f"{took:.3g}", f"{took / found['memcpy']:.3g}")
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
