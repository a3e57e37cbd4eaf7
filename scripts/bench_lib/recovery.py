"""How long a job takes to start and to recover, under this program and under torchrun.

Two nodes with one CPU worker each on one machine; all launchers run the same worker script, in
turn. Times are from the fault to the first step of the slowest worker of the new world.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from elastic_etcd.etcd.embedded import EmbeddedEtcd

from . import faults, figures, launchers
from .figures import Sample, Samples
from .launchers import Launcher

NAMES = ("torchrun c10d", "torchrun etcd-v3", "exec", "prefork", "in process")
SLOW = 20.0  # seconds: what takes longer is not measured in each repetition

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How often and how long. What is slow or without an end is measured `slow` times only."""

    repeat: int
    slow: int
    bound: float
    idle: float
    events: tuple[str, ...]


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no job outlives the benchmark
    # One thread for each worker, whatever the launcher: two cores are few.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return asyncio.run(run(args))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench recovery", description=__doc__)
    add = parser.add_argument
    add("--repeat", type=int, default=3)
    add("--slow", type=int, default=1, help=f"repetitions of what takes more than {SLOW:g} s")
    add("--bound", type=float, default=75, help="seconds after which it has not recovered")
    add("--idle", type=float, default=20, help="seconds to measure CPU over")
    add("--quick", action="store_true", help="--repeat 1 --bound 20 --idle 5")
    add("--only", action="append", choices=NAMES, help="this launcher; may be repeated")
    add("--event", action="append", default=[], help="events with this text; may be repeated")
    add("--json", type=Path, help="write all samples, or why there is none")
    args = parser.parse_args()
    if args.quick:
        args.repeat, args.bound, args.idle = 1, 20.0, 5.0
    args.only = args.only or NAMES
    return args


async def run(args: argparse.Namespace) -> int:
    console = Console(width=max(150, Console().width))
    progress = Console(stderr=True, log_path=False)
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    title = f"recovery: torch {version('torch')}, {machine}, {args.repeat} repetitions"
    async with EmbeddedEtcd() as etcd:
        plan = Plan(args.repeat, args.slow, args.bound, args.idle, tuple(args.event))
        runners = [find(name, etcd.endpoint) for name in args.only]
        samples: dict[str, Samples] = {launcher.name: {} for launcher in runners}

        def save() -> None:
            if args.json:
                text = json.dumps({"title": title, "samples": samples}, indent=1)
                args.json.write_text(text + "\n")

        measure(runners, samples, plan, progress.log, save)
    ours = [launcher.name for launcher in runners if launcher.ours]
    console.print(figures.table(title, faults.MEASURES, samples, ours))
    return 0


def find(name: str, endpoint: str) -> Launcher:
    """The launcher of this name."""
    if name == "torchrun c10d":
        return launchers.c10d()
    if name == "torchrun etcd-v3":
        return launchers.etcd_v3(endpoint)
    return launchers.elastic(name, endpoint)


def measure(
    runners: list[Launcher],
    samples: dict[str, Samples],
    plan: Plan,
    say: Say,
    save: Callable[[], None],
) -> None:
    """Alternate the launchers, event by event, and `save` after each; fills `samples`."""
    for repetition in range(plan.repeat):
        for fault in faults.FAULTS:
            for launcher in runners:
                found = samples[launcher.name]
                if wanted(fault, found, plan):
                    name = f"{fault.measure.name}: {launcher.name}"
                    say(f"{repetition + 1} of {plan.repeat}: {name}")
                    one(launcher, fault, found, plan, plan.idle if repetition == 0 else 0.0)
                    save()


def wanted(fault: faults.Fault, found: Samples, plan: Plan) -> bool:
    if not chosen(fault.measure.name, plan):
        return False
    before = found.get(fault.measure.name, [])
    slow = [s for s in before if isinstance(s, str) or s > SLOW]
    return fault is faults.WORKER or len(slow) < plan.slow


def chosen(name: str, plan: Plan) -> bool:
    return not plan.events or any(text in name for text in plan.events)


def one(launcher: Launcher, fault: faults.Fault, found: Samples, plan: Plan, idle: float) -> None:
    def add(name: str, sample: Sample) -> None:
        found.setdefault(name, []).append(sample)

    try:
        faults.suffer(launcher, fault, plan.bound, idle, add)
    except RuntimeError as error:  # the others' figures are still wanted
        print(error, file=sys.stderr)
