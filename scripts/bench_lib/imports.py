"""`scripts/bench imports`: how long a restart takes to the first line after the script's imports.

A script imports a framework, does a step and exits 1 when it is told to; its launcher starts it
again. Time runs from that exit to the end of the imports in the next worker; its CPU time until
then does not depend on what else the machine does. Frameworks that are not installed are left out.
"""

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from .figures import grid

IMPORTS = {
    "torch": "import torch, torch.distributed",
    "transformers": "from transformers import GPT2Config, GPT2LMHeadModel, Trainer",
    "lightning": "import lightning",
}
MODULES = {"torch": "torch", "transformers": "transformers.trainer", "lightning": "lightning"}
SCRIPT = """\
import os, sys, time
{imports}
imported, spent = time.monotonic(), time.process_time()
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
folder = sys.argv[1]
with open(f"{{folder}}/begun", "w") as begun:  # waits for who measures
    begun.write(f"{{imported}} {{spent}}")
open(f"{{folder}}/exit").read()
with open(f"{{folder}}/exits", "w") as exits:
    exits.write(str(time.monotonic()))
os._exit(1)
"""
OURS = ("elastic_etcd.launch", "--standalone", "--min-uptime=0")
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone"),
    "exec": (*OURS, "--start-method=exec"),
    "torch loaded ahead": OURS,
    "--preload MODULE": (*OURS, "--preload={module}"),
}
REFILL = 4.0  # seconds until workers wait for their order again
PATIENCE = 120.0


def restarts(framework: str, launcher: str, repeats: int) -> Iterator[tuple[float, float]]:
    """Seconds of each restart, and those of CPU time in the worker."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        for fifo in ("begun", "exit", "exits"):
            os.mkfifo(folder / fifo)
        script = folder / "script.py"
        script.write_text(SCRIPT.format(imports=IMPORTS[framework]))
        flags = [flag.format(module=MODULES[framework]) for flag in LAUNCHERS[launcher]]
        more = ("--nproc-per-node=1", f"--max-restarts={repeats + 1}", str(script), name)
        with (folder / "log").open("wb") as log:
            agent = subprocess.Popen([sys.executable, "-m", *flags, *more], stdout=log, stderr=log)
        try:
            (folder / "begun").read_text()
            for _ in range(repeats):
                time.sleep(REFILL)
                (folder / "exit").write_text("")
                exits = float((folder / "exits").read_text())
                imported, spent = map(float, (folder / "begun").read_text().split())
                yield imported - exits, spent
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(PATIENCE)


def show(found: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    for number, what in enumerate(("wall clock", "CPU time of the worker")):
        rows = []
        for framework, times in found.items():
            ways = [[sample[number] for sample in samples] for samples in times.values()]
            rows.append(
                (framework, *(cell(samples, statistics.median(ways[0])) for samples in ways))
            )
        title = (
            f"seconds from an exit to the end of the next imports, {what}: median (range), ratio"
        )
        Console(width=140).print(grid(title, ("", *LAUNCHERS), rows))


def cell(samples: list[float], base: float) -> str:
    middle = statistics.median(samples)
    return f"{middle:.2f} ({min(samples):.2f}-{max(samples):.2f}) {middle / base:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench imports", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", choices=IMPORTS, metavar="FRAMEWORK")
    parser.add_argument("--json", metavar="FILE", help="write the samples there as well")
    args = parser.parse_args()
    installed = [name for name in args.only or IMPORTS if importlib.util.find_spec(name)]
    found = {
        framework: {name: [*restarts(framework, name, args.repeats)] for name in LAUNCHERS}
        for framework in installed
    }
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
