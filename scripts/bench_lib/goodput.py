"""What share of an undisturbed run's steps a job gets done while its workers and nodes die.

Two nodes with one CPU worker each on one machine, steps of 50 ms. A worker is SIGKILLed each 15 s,
on either node in turn; then the same, and node 1 is SIGKILLed with all of its processes each 45 s,
and started again at once. Every launcher has these faults at the same seconds, in one job each, and
its own undisturbed runs to be compared with.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from elastic_etcd.etcd.embedded import EmbeddedEtcd
from tests.support.processes import marked, send

from . import figures, launchers
from .figures import Measure, Samples, Verdict
from .launchers import Launcher
from .nodes import NotRecovered, Run, Stream

NAMES = ("torchrun c10d", "exec", "prefork", "in process")
DEFAULT = ("torchrun c10d", "prefork", "in process")
STEP_SECONDS = 0.05
# What a failure costs is measured, not how many the job would bear.
FLAGS = ("--max-restarts", "100000")
PLAIN = ("--save-every", "1")
WORLD = 2
EPILOG = """
launchers:
  torchrun c10d  torch's own, with its default settings, of a plain script that saves each second.
                 Node 1 is the one that does not host its store: with that it would lose the job.
  prefork, exec  this program, the same script: restarted in each world, it goes on from its file.
  in process     this program, the script under ee.run: it commits each fifth step, and saves none.

How steps are counted is in docs/contributing/performance.md.

examples:
  scripts/bench goodput                                  all of it, about 25 minutes
  scripts/bench goodput --only "in process"              one launcher; may be repeated
  scripts/bench goodput --seconds 90 --undisturbed 15    shorter
  scripts/bench goodput --worker-every 5 --node-every 0  other faults; 0: none of that kind
  scripts/bench goodput --schedule                       what would be done, and when
"""


@dataclass(frozen=True, order=True)
class Fault:
    """`at` seconds after all train: a worker or all of a node, SIGKILLed."""

    at: float
    kind: str
    node: int

    def __str__(self) -> str:
        if self.kind == "worker":
            return f"{self.at:6.1f} s  the worker of node {self.node} SIGKILLed"
        return f"{self.at:6.1f} s  all of node {self.node} SIGKILLed, and started again"


@dataclass(frozen=True)
class Plan:
    """How long, and how many seconds lie between two faults of a kind; 0: there are none."""

    seconds: float
    undisturbed: float
    worker_every: float
    node_every: float

    def faults(self, *, nodes: bool) -> tuple[Fault, ...]:
        """Those of workers, with `nodes` also those of a node, which come between them."""
        found = [
            Fault(at, "worker", number % WORLD)
            for number, at in enumerate(_times(self.worker_every, self.worker_every, self.seconds))
        ]
        if nodes:
            times = _times(self.node_every / 2, self.node_every, self.seconds)
            found += [Fault(at, "node", 1) for at in times]
        return tuple(sorted(found))


def _times(first: float, every: float, end: float) -> Iterator[float]:
    while every and first < end:
        yield first
        first += every


@dataclass(frozen=True)
class Played:
    """A job's steps, and the faults that have hit somebody; times are CLOCK_MONOTONIC.

    `lost`: in the end all agents were gone.
    """

    began: float
    ended: float
    hits: tuple[tuple[float, str], ...]
    streams: list[Stream]
    lost: bool = False

    def steps(self, begin: float, end: float) -> int:
        """How many were reached for the first time between two moments."""
        return self._reached(end) - self._reached(begin)

    def _reached(self, at: float) -> int:
        return max(stream.reached(at) for stream in self.streams)

    def rate(self) -> float:
        """Steps a second."""
        return self.steps(self.began, self.ended) / (self.ended - self.began)

    def costs(self, rate: float) -> list[tuple[str, float]]:
        """Of each fault, the seconds that it took from a run with so many steps a second."""
        ends = [at for at, _ in self.hits[1:]] + [self.ended]
        return [
            (kind, end - at - self.steps(at, end) / rate)
            for (at, kind), end in zip(self.hits, ends, strict=True)
        ]


def play(launcher: Launcher, faults: tuple[Fault, ...], seconds: float) -> Played:
    """One job under these faults, from the moment when both nodes train.

    Raises RuntimeError with what the agents said when it does not begin, or one of ours does not
    end well.
    """
    run = Run(launcher)
    try:
        for _ in range(WORLD):
            run.start()
        run.settled(WORLD)
        played = _played(run, faults, seconds)
        if launcher.ours:
            _ends_well(run)
    except NotRecovered as reason:
        raise RuntimeError(f"{launcher.name}: {reason}:\n{run.said()}") from reason
    else:
        return played
    finally:
        run.close()


def _ends_well(run: Run) -> None:
    """Raises NotRecovered when an agent does not exit 0."""
    if any(codes := run.finish(run.nodes)):
        raise NotRecovered(f"agents exited {codes}")


def _played(run: Run, faults: tuple[Fault, ...], seconds: float) -> Played:
    began, hits = time.monotonic(), []
    for fault in faults:
        run.rest(began + fault.at - time.monotonic())
        if hit := _inject(run, fault):
            hits.append((hit, fault.kind))
    run.rest(began + seconds - time.monotonic())
    return Played(began, began + seconds, tuple(hits), run.streams(), run.lost())


def _inject(run: Run, fault: Fault) -> float | None:
    """When it was done; None if nobody was there."""
    node = run.nodes[fault.node]
    if fault.kind == "worker":
        alive = marked(node.mark)
        worker = max(
            (s for s in run.streams() if s.pid in alive),
            key=lambda s: max(s.passed.values(), default=0),
            default=None,
        )
        at = time.monotonic()
        send(signal.SIGKILL, [worker.pid] if worker else [])
        return at if worker else None
    there = node.process.poll() is None
    at = node.signal(signal.SIGKILL)
    run.start_again(fault.node)
    return at if there else None


def measures(plan: Plan) -> dict[bool, Measure]:
    """The shares of steps: without and with nodes that die."""
    workers = f"a worker SIGKILLed each {plan.worker_every:g} s"
    nodes = f"all of a node each {plan.node_every:g} s"
    both = f"{workers}, {nodes}" if plan.worker_every else nodes.replace("node", "node SIGKILLed")
    return {
        False: Measure(f"{workers}: steps", "%", "≥ 98 %, in process", _share(98)),
        True: Measure(f"{both}: steps", "%", "≥ 97 %, in process", _share(97)),
    }


def _share(least: float) -> Verdict:
    return lambda name, here, _: here >= least if name == "in process" else None


RATE = Measure("undisturbed: steps a second", "1/s")
COSTS = {
    "worker": Measure("lost by a worker's death", "s"),
    "node": Measure("lost by a node's death and its return", "s"),
}


def measure(launcher: Launcher, plan: Plan, found: Samples, progress: Console) -> None:
    """All runs of a launcher, the undisturbed ones first and last; their figures go to `found`."""

    def say(what: str) -> None:
        progress.log(f"{launcher.name}: {what}")

    def undisturbed() -> float:
        say(f"undisturbed, {plan.undisturbed:g} s")
        return play(launcher, (), plan.undisturbed).rate()

    def disturbed(nodes: bool) -> Played:
        faults = plan.faults(nodes=nodes)
        say(f"{len(faults)} faults, {plan.seconds:g} s")
        return play(launcher, faults, plan.seconds)

    wanted = {False: plan.worker_every, True: plan.node_every}
    before = undisturbed()
    runs = {nodes: disturbed(nodes) for nodes, every in wanted.items() if every}
    rates = [before, undisturbed()]
    found[RATE.name] = [*rates]
    for nodes, played in runs.items():
        if played.lost:
            say("the job was lost; no steps were done since")
        found[measures(plan)[nodes].name] = [100 * played.rate() / max(rates)]
        for kind, lost in played.costs(max(rates)):
            found.setdefault(COSTS[kind].name, []).append(lost)


def launcher_of(name: str, endpoint: str) -> Launcher:
    """The launcher with the script of this benchmark."""
    if name == "torchrun c10d":
        made = launchers.c10d(*FLAGS)
    else:
        more = ("--suspect-after", "0", "--stop-after-no-progress", "0")
        made = launchers.elastic(name, endpoint, *FLAGS, *more)
    own = PLAIN if name != "in process" else ()
    return replace(made, script=(*made.script, "--step-seconds", str(STEP_SECONDS), *own))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench goodput",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=180, help="of each disturbed run (default: 180)")
    add("--undisturbed", type=float, default=30, help="seconds of that run (default: 30)")
    add("--worker-every", type=float, default=15, metavar="S", help="default: 15")
    add("--node-every", type=float, default=45, metavar="S", help="default: 45")
    add("--only", action="append", choices=NAMES, help="this launcher; may be repeated")
    add("--schedule", action="store_true", help="print the faults, do nothing")
    add("--json", type=Path, help="write all samples")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    plan = Plan(args.seconds, args.undisturbed, args.worker_every, args.node_every)
    if args.schedule:
        print(*plan.faults(nodes=True), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no job outlives the benchmark
    # One thread for each worker, whatever the launcher: two cores are few.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return asyncio.run(run(plan, args))


async def run(plan: Plan, args: argparse.Namespace) -> int:
    console = Console(width=max(150, Console().width))
    progress = Console(stderr=True, log_path=False)
    machine = f"CPU of one machine, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    title = f"goodput: torch {version('torch')}, {machine}, {plan.seconds:g} s each"
    samples: dict[str, Samples] = {}
    failed = False
    async with EmbeddedEtcd() as etcd:
        for name in args.only or DEFAULT:
            samples[name] = {}
            try:
                measure(launcher_of(name, etcd.endpoint), plan, samples[name], progress)
            except RuntimeError as error:  # the others' figures are still wanted
                print(error, file=sys.stderr)
                failed = True
            if args.json:
                text = json.dumps({"title": title, "samples": samples}, indent=1)
                args.json.write_text(text + "\n")
    shown = (RATE, *measures(plan).values(), *COSTS.values())
    ours = [name for name in samples if name != "torchrun c10d"]
    first = "share of an undisturbed run"
    console.print(figures.table(title, shown, samples, ours, first))
    return int(failed)
