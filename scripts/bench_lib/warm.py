"""`scripts/bench warm`: what a warm worker saves, in time to its first line and in memory.

Workers are started by the agent's own code: forked ahead (one waits), forked when asked for, and
exec'd. Memory is the proportional set size (PSS), read while all workers of that kind are there.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from rich.console import Console
from rich.table import Table

from elastic_etcd.agent.warm import WarmPool
from elastic_etcd.agent.worker import Started, Starter, WorkerSpec, execute

SCRIPT = """\
import time
first = time.monotonic()
import json, signal, sys
import torch, torch.distributed, torch._dynamo
imported = stepped = time.monotonic()
if sys.argv[1] == "step":
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 256)).sum().backward()
    optimizer.step()
    stepped = time.monotonic()
print(json.dumps([first, imported, stepped]), flush=True)
signal.pause()
"""
STAGES = ("pid is known", "first line", "torch imported", "first step")


class Bench:
    """Starts workers in one way or another and measures them."""

    def __init__(self, folder: Path) -> None:
        (folder / "script.py").write_text(SCRIPT)
        self.command = (sys.executable, "-u", str(folder / "script.py"))
        self.env = os.environ | {"OMP_NUM_THREADS": "1"}

    def pool(self, size: int) -> WarmPool:
        return WarmPool((*self.command, "step"), self.env, [], size)

    async def started(self, starter: Starter, until: str) -> tuple[Started, list[float]]:
        """A worker, and the milliseconds from the request to each of STAGES."""
        read, write = os.pipe()
        process: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        spec = WorkerSpec((*self.command, until), self.env, 0, 0, "")
        streams = SimpleNamespace(child_fd=write)
        asked = time.monotonic()
        starter(spec, SimpleNamespace(out=streams, err=streams), process.set_result)
        worker = await process
        times = [time.monotonic()]
        os.close(write)
        with os.fdopen(read) as file:
            times += json.loads(file.readline())
        return worker, [1000 * (at - asked) for at in times]

    async def times(self, starter: Starter) -> list[float]:
        worker, times = await self.started(starter, "step")
        await self.end(worker)
        return times

    async def memory(self, starter: Starter, until: str, workers: int) -> float:
        """MiB for each of so many workers."""
        running = [(await self.started(starter, until))[0] for _ in range(workers)]
        size = sum(pss(worker.pid) for worker in running) / workers
        for worker in running:
            await self.end(worker)
        return size

    async def end(self, worker: Started) -> None:
        pidfd, ended = os.pidfd_open(worker.pid), asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        os.kill(worker.pid, 9)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        worker.poll()


def pss(pid: int) -> float:
    with Path(f"/proc/{pid}/smaps_rollup").open() as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


async def warmed(pool: WarmPool) -> WarmPool:
    pool.start()
    await pool.warm()
    for spare in pool._spares:  # noqa: SLF001 - nobody else has to know them
        while spare.pid is None:  # noqa: ASYNC110 - before the clock runs
            await asyncio.sleep(0.01)
    return pool


async def measure(folder: Path, repeats: int, workers: int) -> dict[str, object]:
    bench = Bench(folder)
    ways: dict[str, list[list[float]]] = {"forked ahead": [], "forked when asked": [], "exec": []}
    begun = time.monotonic()
    on_demand = await warmed(bench.pool(0))
    warming = time.monotonic() - begun
    for _ in range(repeats):
        ahead = await warmed(bench.pool(1))
        ways["forked ahead"].append(await bench.times(ahead.start_worker))
        ahead.close()
        ways["forked when asked"].append(await bench.times(on_demand.start_worker))
        ways["exec"].append(await bench.times(execute))
    memory = {
        until: {
            "forked": await bench.memory(on_demand.start_worker, until, workers),
            "exec": await bench.memory(execute, until, workers),
        }
        for until in ("import", "step")
    }
    assert on_demand.pid is not None
    alone = pss(on_demand.pid)
    on_demand.close()
    return {"warming": warming, "ways": ways, "memory": memory, "pool": alone, "workers": workers}


def show(found: dict) -> None:
    console = Console()
    table = Table("", *STAGES, title="milliseconds after the request: median (least-most)")
    for way, runs in found["ways"].items():
        cells = [
            f"{statistics.median(c):.1f} ({min(c):.1f}-{max(c):.1f})"
            for c in zip(*runs, strict=True)
        ]
        table.add_row(way, *cells)
    console.print(table)
    table = Table(
        "PSS, MiB", "forked", "exec", title=f"memory for each of {found['workers']} workers"
    )
    for until, name in (("import", "torch imported"), ("step", "after a step")):
        sizes = found["memory"][until]
        table.add_row(name, *(f"{sizes[way]:.0f}" for way in ("forked", "exec")))
    console.print(table)
    print(f"the pool: warm after {found['warming']:.1f} s, {found['pool']:.0f} MiB by itself")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench warm", description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4, help="at a time, for the memory")
    parser.add_argument("--json", metavar="FILE", help="write the samples there as well")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), args.repeats, args.workers))
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
