"""What is done to a job of two nodes, and how long it takes until it trains again."""

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.processes import cpu, marked, proportional, resident

from .figures import Measure, Sample, at_most
from .launchers import Launcher
from .nodes import Node, NotRecovered, Run, Stream

LEASE_TTL = 5.0  # this program's default
START = Measure(
    "start → first step",
    "s",
    "≤ 0.6 x c10d",
    lambda _, here, c10d: None if math.isinf(c10d) else here <= 0.6 * c10d,
)
MEMORY = Measure("agent: resident memory", "MB")
REST = Measure("node, all but its worker: memory", "MB")
CPU = Measure("node, all but its worker: idle CPU", "%", "≤ 0.5 %", at_most(0.5))
COSTS = (MEMORY, REST, CPU)

Workers = list[Stream]


@dataclass(frozen=True)
class Fault:
    """`do` gives when it did it, to node 1 if not said otherwise; `before`, `after`: nodes.

    `codes` are our agents' exit codes in the end, None where a node is not to end well.
    """

    measure: Measure
    do: Callable[[Run, Workers], float]
    before: int = 2
    after: int = 1
    codes: tuple[int, ...] | None = None


def _kill_worker(run: Run, workers: Workers) -> float:
    at = time.monotonic()
    os.kill(next(w.pid for w in workers if w.mark == run.nodes[1].mark), signal.SIGKILL)
    return at


def _to_agent(number: signal.Signals) -> Callable[[Run, Workers], float]:
    def do(run: Run, _: Workers) -> float:
        at = time.monotonic()
        os.kill(run.nodes[1].pid, number)
        return at

    return do


def _to_node(number: signal.Signals, index: int = 1) -> Callable[[Run, Workers], float]:
    return lambda run, _: run.nodes[index].signal(number)


def _add(run: Run, _: Workers) -> float:
    run.start()
    return math.nan  # counted from the last step before the change


_TTL = f"≤ lease TTL ({LEASE_TTL:g} s) + 0.8 s"
_SOON = at_most(LEASE_TTL + 0.8)
_DEATH = "≤ 0.6 s, in process ≤ 0.4 s", at_most(0.6, in_process=0.4)
_STOP, _KILL, _TERM = signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM
WORKER = Fault(
    Measure("worker SIGKILLed", "s", "≤ 0.30 s", at_most(0.30)), _kill_worker, after=2, codes=(0, 0)
)
ADDED = Fault(
    Measure("node added: pause", "s", "≤ 0.35 s", at_most(0.35)), _add, 1, 2, codes=(0, 0)
)
FAULTS = (
    WORKER,
    Fault(Measure("agent SIGKILLed", "s", "≤ 0.6 s", at_most(0.6)), _to_agent(_KILL)),
    Fault(Measure("all processes of a node SIGKILLed", "s", *_DEATH), _to_node(_KILL)),
    Fault(
        Measure("all processes of node 0 SIGKILLed (c10d's store)", "s", *_DEATH),
        _to_node(_KILL, 0),
    ),
    Fault(Measure("node SIGSTOPped", "s", _TTL, _SOON), _to_node(_STOP)),
    ADDED,
    Fault(Measure("node leaves by SIGTERM", "s"), _to_agent(_TERM), codes=(0, 128 + _TERM)),
)
MEASURES = (START, *(fault.measure for fault in FAULTS), *COSTS)


def suffer(
    launcher: Launcher, fault: Fault, bound: float, idle: float, add: Callable[[str, Sample], None]
) -> None:
    """One job and one fault: the samples go to `add`. What is not over by `bound` is text.

    Raises RuntimeError with what the agents said, when that is not known of this launcher.
    """
    run = Run(launcher, alone=fault.before == 1)
    now = START
    try:
        nodes = [run.start() for _ in range(fault.before)]
        first = run.first_step(fault.before)
        if fault.before == 2:
            add(START.name, first - nodes[0].started)
        workers = run.settled(fault.before)
        if fault is WORKER:
            _costs(run, workers, idle, add)
        now = fault.measure
        at = fault.do(run, workers)
        recovered = run.first_step(fault.after, bound)
        took = recovered - (run.last_old_step() if math.isnan(at) else at)
        run.settled(fault.after)
        add(now.name, took)
        if launcher.ours and fault.codes is not None:
            codes = tuple(run.finish(run.nodes))
            if codes != fault.codes:
                raise RuntimeError(f"{now.name}: agents exited {codes}:\n{run.said()}")
    except NotRecovered as reason:
        add(now.name, str(reason))
        if launcher.ours or now is START:  # the peers' are known
            raise RuntimeError(f"{launcher.name}, {now.name}: {reason}:\n{run.said()}") from reason
    finally:
        run.close()


def _costs(run: Run, workers: Workers, idle: float, add: Callable[[str, Sample], None]) -> None:
    """What a node takes while its worker trains undisturbed."""
    training = {worker.pid for worker in workers}

    def rest(node: Node) -> list[int]:
        return [pid for pid in marked(node.mark) if pid not in training]

    for node in run.nodes:
        add(MEMORY.name, resident(node.pid))
        add(REST.name, proportional(rest(node)))
    if idle:
        for percent in cpu([rest(node) for node in run.nodes], idle):
            add(CPU.name, percent)
