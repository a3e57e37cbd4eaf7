"""`scripts/bench sharded`: FSDP2 that changes its world, beside torchrun with checkpoints in tmpfs.

Two jobs of two nodes, on the CPU and over gloo: one under `@ee.run`, and one that torchrun starts
anew, whose script saves by torch.distributed.checkpoint (DCP). In both a worker and a node are
SIGKILLed; the time is that to the slowest worker's next step. Then four processes, each as a node
of its own, commit and go through changes of their world, and DCP saves and loads the same. Memory
of a node is that of its pieces and copies, beside the values themselves. The wire's least is what
the ranks need and do not have; "moving" is to receive that in one piece, and to copy the whole part
once into new memory, as that of a new world's tensors is. Beside it stands a restore without the
script's own `build`.
"""

import argparse
import asyncio
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

from elastic_etcd.etcd.embedded import EmbeddedEtcd
from elastic_etcd.train.sharded import piece_store
from elastic_etcd.train.sharded.dtensors import piece_of
from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.snapshot_bytes import TensorSlice, write_body
from tests.support.forked import Child, group

from . import faults, figures, launchers
from .figures import Measure, Samples, at_most
from .nodes import NotRecovered
from .sharded_worker import fill, load, save, sharded

TORCHRUN, OURS = "torchrun c10d", "in process"  # the first is what figures has ratios to
MODULE = ("-m", "scripts.bench_lib.sharded_worker")
KILLS = (faults.FAULTS[0], faults.FAULTS[2])  # a worker; all processes of a node
COPIES = 2
# How a world ends, and the processes that are in the next one; each is a node.
FIRST = (0, 1, 2, 3)
CHANGES: tuple[tuple[str, tuple[int, ...], bool], ...] = (
    ("one of 4 nodes is replaced", (0, 1, 2, 4), False),
    ("one of 4 nodes is lost", (0, 1, 2), False),
    ("a node joins 3", (0, 1, 2, 3), True),
    ("two of 4 nodes leave", (0, 1), True),
)
COMMIT = Measure("commit; DCP: save", "s")
FIRST_COMMIT = Measure("commit, the first", "s")
ALONE = Measure("commit without copies", "x memcpy", "≤ 1.3", at_most(1.3))
SUMMED = Measure("copied and summed, no more", "x memcpy")
WITH = Measure("commit with copies", "x memcpy")
MADE = Measure("copies of it, within the commit", "s")
MEMORY = Measure(
    "memory of a node", "x its part", f"≤ {2 + COPIES}, headers apart", at_most(1.01 * (2 + COPIES))
)


def restored(change: str) -> Measure:
    return Measure(f"{change}: restored", "s")


def built(change: str) -> Measure:
    return Measure(f"{change}: build, of that", "s")


def wire(change: str) -> Measure:
    return Measure(f"{change}: bytes on the wire", "x the least", "≤ 1.05", at_most(1.05))


def moving(change: str) -> Measure:
    return Measure(f"{change}: the rest of it", "x moving", "≤ 2", at_most(2))


def killed(fault: faults.Fault, megabytes: int) -> Measure:
    if megabytes:
        return Measure(f"{fault.measure.name}, {megabytes} MB", "s")
    return Measure(f"{fault.measure.name}, a toy", "s", "≤ 0.30 s", at_most(0.30))


def measures(megabytes: int) -> list[Measure]:
    names = [change for change, _, _ in CHANGES]
    kills = [killed(fault, size) for size in (0, megabytes) for fault in KILLS]
    changes = [of(name) for of in (restored, built, moving, wire) for name in names]
    return [*kills, COMMIT, FIRST_COMMIT, ALONE, SUMMED, WITH, MADE, *changes, MEMORY]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench sharded", description=__doc__)
    add = parser.add_argument
    add("--megabytes", type=int, default=100, help="of the weights and moments of all ranks")
    add("--repeat", type=int, default=1)
    add("--bound", type=float, default=60, help="seconds after which a job has not recovered")
    add("--no-worlds", action="store_true", help="only jobs")
    add("--no-jobs", action="store_true", help="only commits and changes, without etcd")
    add("--json", type=Path, help="write all samples")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no job outlives the benchmark
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tempfile.tempdir = "/dev/shm"  # noqa: S108 - no disk
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    title = f"sharded, {args.megabytes} MB: torch {version('torch')}, {machine}, "
    title += f"{args.repeat} repetitions"
    samples: dict[str, Samples] = {TORCHRUN: {}, OURS: {}}
    for _ in range(args.repeat):
        if not args.no_jobs:
            asyncio.run(jobs(args.megabytes, args.bound, samples))
        if not args.no_worlds:
            with tempfile.TemporaryDirectory() as folder:
                in_worlds(Path(folder), args.megabytes, samples)
        if args.json:
            args.json.write_text(json.dumps({"title": title, "samples": samples}, indent=1) + "\n")
    shown = title, measures(args.megabytes), samples, [OURS]
    Console(width=130).print(figures.table(*shown, first="event"))
    return 0


# --- jobs whose workers and nodes die -----------------------------------------------------


async def jobs(megabytes: int, bound: float, samples: dict[str, Samples]) -> None:
    async with EmbeddedEtcd() as etcd:
        for size in (0, megabytes):
            script = (*MODULE, "--megabytes", str(size))
            for launcher in (
                replace(launchers.c10d(), script=script),
                replace(launchers.elastic(OURS, etcd.endpoint), script=(*script, "--in-process")),
            ):
                for fault in KILLS:
                    print(f"{launcher.name}: {killed(fault, size).name}", file=sys.stderr)
                    took = suffer(launcher, fault, bound)
                    found = samples[launcher.name]
                    found.setdefault(killed(fault, size).name, []).append(took)


def suffer(launcher: launchers.Launcher, fault: faults.Fault, bound: float) -> figures.Sample:
    """The seconds, or why there are none; the job has twice the bound for all that it does."""
    found: Samples = {}

    def give_up(*_: object) -> None:
        raise NotRecovered(f"no end after {2 * bound:g} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 2 * bound)
    try:
        faults.suffer(
            *(launcher, fault, bound, 0.0),
            lambda name, sample: found.setdefault(name, []).append(sample),
        )
    except RuntimeError as error:  # the others' figures are still wanted
        print(error, file=sys.stderr)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return found.get(fault.measure.name, ["no start"])[0]


# --- four nodes, each a process -----------------------------------------------------------


def in_worlds(folder: Path, megabytes: int, samples: dict[str, Samples]) -> None:
    """Commits and changes of world; adds what the slowest rank took."""
    children = [Child(live, process, folder, megabytes) for process in range(5)]
    for name, rows in children[0].result(1800).items():
        for launcher, value in rows.items():
            samples[launcher].setdefault(name, []).append(value)
    for child in children[1:]:
        child.result(60)


def live(process: int, folder: Path, megabytes: int) -> dict[str, dict[str, float]]:
    """One node's way; what process 0 has measured, by names and launchers."""

    def build(world: Any) -> dict[str, Any]:
        began = time.perf_counter()
        model, optimizer = sharded(megabytes, world.mesh())
        builds.append(time.perf_counter() - began)
        return {"model": model, "optimizer": optimizer}

    builds: list[float] = []
    found: dict[str, dict[str, float]] = {}
    state: ElasticState | None = None
    ends = [*CHANGES, ("", (), False)]
    for number, (_, following, planned) in enumerate(ends):
        members = ends[number - 1][1] if number else FIRST
        if process not in members:
            continue
        rank = members.index(process)
        os.environ |= {"GROUP_RANK": str(rank), "ELASTIC_ETCD_GENERATION": str(number + 1)}
        os.environ["ELASTIC_ETCD_COPIES"] = str(COPIES)
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - as ee.run does
        (there := folder / str(number)).mkdir(exist_ok=True)
        with group(rank, len(members), there):
            if number:
                state = state or ElasticState(build=build, first=begin, epoch=0)
                found |= changed(state, ends[number - 1][0], folder / "saved", megabytes, builds)
            else:
                found |= committed(build)
                state = ElasticState(build=build, first=begin, epoch=0)
                state.sync()
                trained(state)
                for _ in range(2):
                    state.commit()
                found[MEMORY.name] = {OURS: slowest(kept(state) / part_of(state))}
                found[COMMIT.name] |= {TORCHRUN: stored(state, folder / "saved")}
            if planned:
                state._leave(leaves=process not in following)  # noqa: SLF001
            else:
                state.commit()
            dist.barrier()
            state._end_world()  # noqa: SLF001
        state = state if process in following else None  # its memory goes with it
    return found


def committed(build: Callable[[Any], dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Commits with copies and without, beside memcpy of a rank's part; they take turns."""
    took: dict[int, list[float]] = {}
    for copies in (1, COPIES):
        os.environ["ELASTIC_ETCD_COPIES"] = str(copies)
        state = ElasticState(build=build, first=begin, epoch=0)
        state.sync()
        trained(state)
        first = seconds(state.commit)
        state.commit()
        whole = torch.ones(part_of(state), dtype=torch.uint8)
        slices = slices_of(state)
        ways = state.commit, partial(copy, whole, slices), partial(write_body, whole, [slices])
        rounds = [[seconds(way) for way in ways] for _ in range(5)]
        took[copies] = [median(times) for times in zip(*rounds, strict=True)]
        state._end_world()  # noqa: SLF001
    (alone, copied, summed), (together, *_) = took[1], took[COPIES]
    return {
        COMMIT.name: {OURS: together},
        FIRST_COMMIT.name: {OURS: first},
        ALONE.name: {OURS: alone / copied},
        SUMMED.name: {OURS: summed / copied},
        WITH.name: {OURS: together / copied},
        MADE.name: {OURS: together - alone},
    }


def stored(state: ElasticState, folder: Path) -> float:
    """Seconds of a save by DCP."""
    save(folder, state.model, state.optimizer, 1)
    return median(seconds(lambda: save(folder, state.model, state.optimizer, 1)) for _ in range(3))


def changed(
    state: ElasticState, change: str, folder: Path, megabytes: int, builds: list[float]
) -> dict[str, dict[str, float]]:
    """The restore of a new world, for which `builds` gets its last one, and the same by DCP."""
    with counted() as sent:
        took = seconds(state.sync)
    build = slowest(builds[-1])
    version = state._snapshots.version()  # noqa: SLF001
    store = state._built._shards  # type: ignore[union-attr]  # noqa: SLF001
    needed = missing(state, store._pieces_of(version))  # type: ignore[union-attr, arg-type]  # noqa: SLF001
    least, all_sent = total(needed), total(sum(sent))
    moved = moved_in(int(slowest(needed)), part_of(state))
    size = dist.get_world_size()

    def by_dcp() -> None:
        mesh = init_device_mesh("cpu", (size,))
        load(folder, *sharded(megabytes, mesh))

    return {
        restored(change).name: {OURS: took, TORCHRUN: seconds(by_dcp)},
        built(change).name: {OURS: build},
        moving(change).name: {OURS: (took - build) / moved},
        wire(change).name: {OURS: max(all_sent, 1) / max(least, 1)},
    }


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends for its pieces."""
    sent: list[int] = []
    module: Any = piece_store
    real = module.exchange

    def noted(sends: Any, sizes: Any) -> Any:
        def each(messages: Any) -> Iterator[torch.Tensor]:
            for message in messages:
                sent.append(message.nbytes)
                yield message

        return real({to: each(messages) for to, messages in sends.items()}, sizes)

    module.exchange = noted
    try:
        yield sent
    finally:
        module.exchange = real


def missing(state: ElasticState, held: Any) -> float:
    """Bytes of this rank's new pieces that none of those has which it held."""
    found = 0.0
    for name, tensor in tensors_of(state):
        target = piece_of(name, tensor)
        lacks = torch.ones(target.shape, dtype=torch.bool)
        for piece in held:
            if part := piece.overlap(target):
                lacks[part.within(target)] = False
        found += float(lacks.sum()) * tensor.dtype.itemsize
    return found


def tensors_of(state: ElasticState) -> Iterator[tuple[str, Any]]:
    """The sharded ones, by their names in a snapshot."""
    for name, value in state.model.state_dict().items():
        yield f"model.{name}", value
    moments = state.optimizer.state_dict()["state"]
    for number, values in moments.items():
        for name, value in values.items():
            if hasattr(value, "to_local"):
                yield f"optimizer.state.{number}.{name}", value


def moved_in(wanted: int, part: int) -> float:
    """Seconds in which rank 0 receives so many bytes of rank 1, and each copies its part."""
    there = torch.ones(max(1, wanted), dtype=torch.uint8)
    source = torch.ones(part, dtype=torch.uint8)

    def move() -> None:
        if dist.get_rank() == 0 and wanted:
            dist.recv(there, 1)
        elif dist.get_rank() == 1 and wanted:
            dist.send(there, 0)
        copy(torch.empty_like(source), [(0, source)])

    return median(seconds(move) for _ in range(3))


def begin(state: ElasticState) -> None:
    fill(state.model)


def trained(state: ElasticState) -> None:
    """A step, which makes the moments."""
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.epoch += 1


def part_of(state: ElasticState) -> int:
    """Bytes of this rank's part."""
    return sum(value.to_local().nbytes for _, value in tensors_of(state))


def kept(state: ElasticState) -> int:
    """Bytes of this rank's memory files for its pieces and copies."""
    store: Any = state._built._shards  # type: ignore[union-attr]  # noqa: SLF001
    files = [*store._own, *(memfd for pair in store._kept for memfd in pair)]  # noqa: SLF001
    return sum(os.fstat(memfd.fd).st_blocks * 512 for memfd in files)


def slices_of(state: ElasticState) -> list[TensorSlice]:
    """This rank's part: each tensor, and its place in a copy of them all."""
    flat = [value.to_local().view(-1).view(torch.uint8) for _, value in tensors_of(state)]
    ends = accumulate(map(len, flat), initial=0)
    return list(zip(ends, flat, strict=False))


def copy(target: torch.Tensor, slices: list[TensorSlice]) -> None:
    for start, part in slices:
        ctypes.memmove(target.data_ptr() + start, part.data_ptr(), len(part))


def seconds(call: Callable[[], object]) -> float:
    """From the first rank's begin to the last one's end."""
    dist.barrier()
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    return slowest(ended) + slowest(-began)


def slowest(value: float) -> float:
    return reduced(value, dist.ReduceOp.MAX)


def total(value: float) -> float:
    return reduced(value, dist.ReduceOp.SUM)


def reduced(value: float, how: Any) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, how)
    return float(found)
