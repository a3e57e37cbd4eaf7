"""`scripts/bench prefork`: what forking workers ahead saves, in time and in memory.

Workers are started by the agent's own code: forked ahead (one waits), forked when asked for, and
exec'd. Memory is the proportional set size (PSS), read while all workers of that kind are there.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from rich.console import Console

from elastic_etcd.agent.prefork import Prefork
from elastic_etcd.system.child_process import Process, end, start
from tests.support.processes import proportional

from .figures import grid

# Its arguments are a worker's command, environment, and the descriptor of its stdout and stderr.
Starter: TypeAlias = Callable[[tuple[str, ...], dict[str, str], int], Awaitable[Process]]

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

    def prefork(self, size: int) -> Prefork:
        return Prefork((*self.command, "step"), self.env, [], size, asyncio.create_task)

    async def started(self, starter: Starter, until: str) -> tuple[Process, list[float]]:
        """A worker, and the milliseconds from the request to each of STAGES."""
        read, write = os.pipe()
        asked = time.monotonic()
        worker = await starter((*self.command, until), self.env, write)
        times = [time.monotonic()]
        os.close(write)
        with os.fdopen(read) as file:
            times += json.loads(file.readline())
        return worker, [1000 * (at - asked) for at in times]

    async def times(self, starter: Starter) -> list[float]:
        worker, times = await self.started(starter, "step")
        end(worker)
        return times

    async def memory(self, starter: Starter, until: str, workers: int) -> float:
        """MB for each of so many workers."""
        running = [(await self.started(starter, until))[0] for _ in range(workers)]
        size = proportional(worker.pid for worker in running) / workers
        for worker in running:
            end(worker)
        return size


async def executed(argv: tuple[str, ...], env: dict[str, str], to: int) -> Process:
    """As the agent does it."""
    return await start(argv, env, stdout=to, stderr=to, stdin=subprocess.DEVNULL, session=True)


def forked(prefork: Prefork) -> Starter:
    async def forks(argv: tuple[str, ...], env: dict[str, str], to: int) -> Process:
        return await prefork.fork(argv, env, to, to)

    return forks


async def ready(prefork: Prefork) -> Prefork:
    prefork.start()
    await prefork.imported()
    for worker in prefork._waiting:  # noqa: SLF001 - nobody else has to know them
        while worker.pid is None:  # noqa: ASYNC110 - before the clock runs
            await asyncio.sleep(0.01)
    return prefork


async def measure(folder: Path, repeats: int, workers: int) -> dict[str, object]:
    bench = Bench(folder)
    ways: dict[str, list[list[float]]] = {"forked ahead": [], "forked when asked": [], "exec": []}
    begun = time.monotonic()
    on_demand = await ready(bench.prefork(0))
    loading = time.monotonic() - begun
    for _ in range(repeats):
        ahead = await ready(bench.prefork(1))
        ways["forked ahead"].append(await bench.times(forked(ahead)))
        ahead.close()
        ways["forked when asked"].append(await bench.times(forked(on_demand)))
        ways["exec"].append(await bench.times(executed))
    memory = {
        until: {
            "forked": await bench.memory(forked(on_demand), until, workers),
            "exec": await bench.memory(executed, until, workers),
        }
        for until in ("import", "step")
    }
    assert on_demand.pid is not None
    alone = proportional([on_demand.pid])
    on_demand.close()
    return {"loading": loading, "ways": ways, "memory": memory, "server": alone, "workers": workers}


def show(found: dict[str, Any]) -> None:
    console = Console()
    rows = []
    for way, runs in found["ways"].items():
        stages = zip(*runs, strict=True)
        cells = (f"{statistics.median(s):.1f} ({min(s):.1f}-{max(s):.1f})" for s in stages)
        rows.append((way, *cells))
    console.print(grid("milliseconds after the request: median (range)", ("", *STAGES), rows))
    kinds = ("forked", "exec")
    rows = []
    for until, name in (("import", "torch imported"), ("step", "after a step")):
        sizes = found["memory"][until]
        rows.append((name, *(f"{sizes[kind]:.0f}" for kind in kinds)))
    title = f"memory for each of {found['workers']} workers"
    console.print(grid(title, ("PSS, MB", *kinds), rows))
    print(f"fork server: ready after {found['loading']:.1f} s, {found['server']:.0f} MB by itself")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench prefork", description=__doc__)
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
