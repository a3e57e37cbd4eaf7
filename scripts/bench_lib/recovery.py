"""How long a job takes to start and to recover, under torchrun and under this program.

Both run the same worker script, with two agents and one CPU worker each, in turn, on one
machine. Times are from the fault to the first step of the slowest worker of the new world.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from select import poll

from elastic_etcd.core.keys import PREFIX

from .first_request import Proxy
from .nodes import NotRecovered, Run, elastic, torchrun
from .processes import cpu_seconds, resident
from .rounds import RoundsWatch
from .table import Measure, Samples

LEASE_TTL = 5.0  # this program's default
TRIES = 4  # of a torchrun job that hangs
START, WORKER, NODE = (
    "start -> first step",
    "worker killed -> first step",
    "node killed -> first step",
)
REQUEST, MEMORY, CPU = "agent start -> first request", "agent's resident memory", "agent's CPU"
FINAL = "last ack -> final round seen"
MEASURES = (
    Measure(START, "s", "<= torchrun", lambda here, torchrun: here <= torchrun),
    Measure(WORKER, "s", "<= 0.6 x torchrun", lambda here, torchrun: here <= 0.6 * torchrun),
    Measure(NODE, "s", "<= lease TTL + 3.5 s", lambda here, _: here <= LEASE_TTL + 3.5),
    Measure(REQUEST, "s", "< 0.4 s", lambda here, _: here < 0.4),
    Measure(MEMORY, "MB", "< 60 MB", lambda here, _: here < 60),
    Measure(CPU, "%", "< 0.5 % of a core", lambda here, _: here < 0.5),
    Measure(FINAL, "s", "< 0.05 s", lambda here, _: here < 0.05),
)


@dataclass(frozen=True)
class Plan:
    """How often and how long. torchrun needs 46 s for a killed node, so that is done less often."""

    repeat: int = 3
    torchrun_node_kills: int = 1
    idle_seconds: float = 20.0
    launchers: tuple[str, ...] = ("torchrun", "elastic_etcd")


def measure(endpoint: str, plan: Plan, say: Callable[[str], None]) -> dict[str, Samples]:
    """Alternate the launchers; the samples of each, by measure."""
    samples: dict[str, Samples] = {name: {} for name in plan.launchers}
    for number in range(plan.repeat):
        for name, found in samples.items():
            say(f"repetition {number + 1} of {plan.repeat}: {name}")
            idle = plan.idle_seconds if number == 0 else 0.0
            if name == "torchrun":
                kill_node = len(found.get(NODE, [])) < plan.torchrun_node_kills
                for _ in range(TRIES):
                    if _faults(Run(torchrun()), found, kill_node=kill_node, idle=idle):
                        break
                    idle = 0.0
                _first_request(None, found)
            else:
                job = f"bench-{os.getpid()}-{number}"
                watch = RoundsWatch(endpoint, f"{PREFIX}/{job}")
                try:
                    _faults(Run(elastic(endpoint, job)), found, kill_node=True, idle=idle)
                finally:
                    _add(found, FINAL, *watch.close())
                _first_request(endpoint, found)
    return samples


def _add(found: Samples, name: str, *values: float) -> None:
    found.setdefault(name, []).extend(values)


def _faults(run: Run, found: Samples, *, kill_node: bool, idle: float) -> bool:
    """One job: start, kill a worker, kill a node, finish. False if it hung: an infinite sample.

    torchrun's jobs hang when one agent sees its worker fail and the other one first sees that the
    membership changed: only the former counts a restart, so that their workers look for each
    other under different TORCHELASTIC_RESTART_COUNTs in the store.
    """
    fault = START
    try:
        survivor, victim = run.start(), run.start()
        _add(found, START, run.first_step(world=2) - survivor.started)
        workers = run.settled(world=2)
        _add(found, MEMORY, *(resident(node.pid) for node in run.nodes))
        if idle:
            _add(found, CPU, *_cpu([node.pid for node in run.nodes], idle))

        fault, killed = WORKER, time.monotonic()
        os.kill(next(pid for pid, agent in workers.items() if agent == victim.pid), signal.SIGKILL)
        _add(found, WORKER, run.first_step(world=2) - killed)
        run.settled(world=2)
        if kill_node:
            # Node 0 has torchrun's store: with it the job would end.
            fault, killed = NODE, victim.kill()
            _add(found, NODE, run.first_step(world=1, seconds=120) - killed)
            run.settled(world=1)
        code = run.finish(survivor)
        if code:
            raise RuntimeError(f"the surviving agent exited {code}")
    except NotRecovered as hung:
        print(f"{fault}: {hung}", file=sys.stderr)
        _add(found, fault, math.inf)
        return False
    finally:
        run.close()
    return True


def _cpu(pids: list[int], seconds: float) -> list[float]:
    """Percent of a core that each process takes over a stretch of undisturbed training."""
    before = [(cpu_seconds(pid), time.monotonic()) for pid in pids]
    poll().poll(seconds * 1000)  # nothing to wait for but time itself
    after = [(cpu_seconds(pid), time.monotonic()) for pid in pids]
    return [
        100 * (cpu - cpu0) / (at - at0)
        for (cpu0, at0), (cpu, at) in zip(before, after, strict=True)
    ]


def _first_request(endpoint: str | None, found: Samples) -> None:
    """From an agent's start to the first request to its etcd; None: torchrun, to its store."""
    proxy = Proxy(endpoint)
    run = Run(elastic(f"127.0.0.1:{proxy.port}") if endpoint else torchrun(proxy.port))
    try:
        node = run.start()
        _add(found, REQUEST, proxy.first() - node.started)
    finally:
        run.close()
        proxy.close()
