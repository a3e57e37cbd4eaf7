"""Tells when a worker has not ended its step for too long, where it stands, and who is behind.

Only what is known to be a step is watched: not what comes before the first one of a world has
ended, nor commits, saves and what `ee.quiet` was told. The agents find out together whom the others
wait for (core/hangs.py); one that gets no answer tells of its own workers.
"""

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from elastic_etcd.agent.followers import nccl_trace
from elastic_etcd.agent.membership import Membership
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.agent.worker import Worker
from elastic_etcd.agent.workers import Workers
from elastic_etcd.core import hangs, schema, writes
from elastic_etcd.core.lifecycle import State
from elastic_etcd.core.schema import Hang, NodeSteps, RankStep
from elastic_etcd.core.view import Everything, View
from elastic_etcd.protocol.activity import DUMP_STACKS, Activity, Doing
from elastic_etcd.system.groups import members_of
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import (
    HANG_ALONE,
    HANG_ASK,
    HANG_AT_LEAST,
    HANG_EVIDENCE,
    HANG_LEARNT,
    HANG_STACKS,
)

_PACE = 1.0
_LOOK = 0.2  # between two looks at what is being written
_TIMES = 10  # the slowest of the recent steps
_PROCESSES, _THREADS = 64, 256  # of a worker, that are looked at
_TAIL = 1 << 15
_LONGEST = 1 << 13  # characters of a stack that is told
_KERNEL = 1 << 12  # bytes of each file of a thread's
# What faulthandler writes of the thread that takes the signal, which is the main one.
_STACK = re.compile(r"^Stack [^\n]*\n((?:  File [^\n]*(?:\n|\Z))+)", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

log = logging.getLogger(__name__)

Reached: TypeAlias = tuple[Doing, int]  # what a worker does, after how many steps


class Evidence(NamedTuple):
    """What was found out about a worker that stood: after how many steps, and its Python stack."""

    steps: int
    stack: str


class HangWatch:
    """Both `watch()` and `answer()` run for ever, and `see` is told of every state.

    timeout: seconds in one step; None: ten times the slowest of the recent ones, but twice the
    longest that this agent has seen, and a minute, at least.
    """

    def __init__(
        self, timeout: float | None, membership: Membership, workers: Workers, logs: Logs
    ) -> None:
        self._timeout = timeout
        self._membership = membership
        self._workers = workers
        self._logs = logs
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._state: State | None = None
        self._heard: tuple[int, int] | None = None  # generation and number of the last line
        self._question = (0, 0), 0.0  # the open one, as long as this agent leads, and since when
        self._slowest = 0.0  # of all steps of all worlds, as far as one look a second tells
        self._seen: dict[int, Activity] = {}  # by rank, at the look before
        self._begin(0)

    def _begin(self, generation: int) -> None:
        """A step that was given up may have been slow only: no more than its time counts."""
        for last in filter(_is_step, self._seen.values()):
            self._slowest = max(self._slowest, min(last.seconds, self._patience(last)))
        self._generation = generation
        self._seen.clear()
        self._evidence: dict[int, Evidence] = {}  # by rank; of those that have not gone on
        self._said = 0  # the number of the steps that were published last
        self._published: dict[int, Reached] = {}  # where the ranks that stood were then
        self._judged: dict[int, Reached] = {}  # the same, once all were asked
        self._again = math.inf  # seconds in its step, until a judged one is asked about again
        self._suspicion: float | None = None  # since when nobody has asked about one
        self._longest = 0.0  # of those that nobody has asked about

    # --- this node's own workers ----------------------------------------------------------

    async def watch(self) -> None:
        """Look at each worker once a second."""
        while True:
            await asyncio.sleep(_PACE)
            if self._generation != self._workers.generation:
                self._begin(self._workers.generation)
            found = [
                (w, now) for w, now in self._workers.activities() if self._stands_too_long(w, now)
            ]
            await self._suspect([worker for worker, _ in found])
            self._longest = max((now.seconds for _, now in found), default=0.0)
            self._news.set()

    async def _suspect(self, late: list[Worker]) -> None:
        """All nodes are asked about these, as soon as etcd answers."""
        if not late:
            self._suspicion = None
        elif self._suspicion is None:
            self._suspicion = self._loop.time()
        elif self._loop.time() >= self._suspicion + HANG_ALONE:
            await self._gather([w for w in late if w.spec.rank not in self._evidence])

    def _stands_too_long(self, worker: Worker, now: Activity) -> bool:
        """Whether it is too long in its step, and nobody knows it yet."""
        rank = worker.spec.rank
        found = self._evidence.get(rank)
        if found and _reached(now) != (Doing.STEP, found.steps):
            log.warning("rank %d goes on after step %d", rank, found.steps + 1)
            del self._evidence[rank]
        before, self._seen[rank] = self._seen.get(rank), now
        if before and _is_step(before) and now.steps > before.steps:
            self._slowest = max(self._slowest, before.seconds)
        if not _is_step(now):
            return False
        if self._judged.get(rank) == _reached(now) and now.seconds < self._again:
            return False
        if before is None or _reached(before) != _reached(now):
            return False  # what is read while it is written may be of two times
        return now.seconds >= self._patience(now) and not _is_traced(worker.pid)

    def _patience(self, now: Activity) -> float:
        """How long its step may take."""
        if self._timeout is not None:
            return self._timeout
        learnt = min(2 * self._slowest, HANG_LEARNT)
        return max(HANG_AT_LEAST, _TIMES * now.slowest, learnt)

    def _settle(self) -> None:
        """All nodes were asked about those that were published."""
        self._judged, self._suspicion, self._again = self._published, None, math.inf

    def _standing(self, seconds: float) -> dict[int, Reached]:
        now = self._workers.activities()
        return {w.spec.rank: _reached(at) for w, at in now if _stands(w, at, seconds)}

    async def _gather(self, hanging: list[Worker]) -> None:
        """Say where they stand: into a file for each, and into their own output."""
        if not hanging:
            return
        known = {worker.pid: worker.output.err.tail() for worker in hanging}
        asked = {worker.pid for worker in hanging if _ask_for_stacks(worker.pid)}
        traces = await _ask_for_traces(hanging)
        await _await_stacks([w for w in hanging if w.pid in asked], known)
        now = {worker.pid: activity for worker, activity in self._workers.activities()}
        hanging = [worker for worker in hanging if worker.pid in now]
        for worker in hanging:
            output, at = worker.output.err.tail(), now[worker.pid]
            new = output if output != known[worker.pid] else b""
            self._evidence[worker.spec.rank] = Evidence(at.steps, _stack(new))
            log.warning(
                "rank %d is in step %d for %.0f s; its slowest of late took %.1f s "
                "(--hang-timeout)",
                *(worker.spec.rank, at.steps + 1, at.seconds, at.slowest),
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANG_EVIDENCE):
                for worker in hanging:
                    await self._write_evidence(worker, has_handler=worker.pid in asked)
                for rank, trace in traces:
                    await self._collect(rank, trace)

    async def _write_evidence(self, worker: Worker, *, has_handler: bool) -> None:
        rank, output = worker.spec.rank, worker.output.err.tail()[-_TAIL:]
        path = self._logs.evidence_file(self._generation, rank)
        stacks = "" if has_handler else "; it has no handler for stacks"
        if path is None:
            log.warning("rank %d: its stacks are in its stderr%s", rank, stacks)
            return
        try:
            await in_thread(partial(_write_file, path, worker.pid, rank, output), HANG_EVIDENCE)
        except OSError as error:  # a TimeoutError is one
            log.warning("rank %d: nothing can be written: %s", rank, error)
        else:
            log.warning("rank %d: where it stands is in %s%s", rank, path, stacks)

    async def _collect(self, rank: int, trace: nccl_trace.Dump) -> None:
        """Copy it as soon as it has been written: it has changed, and does so no more."""
        now, last = trace.before, None
        while now == trace.before or now != last:  # is not there, or grows
            await asyncio.sleep(_LOOK)
            now, last = await in_thread(partial(nccl_trace.stamp, trace.path), HANG_EVIDENCE), now
        path = self._logs.evidence_file(self._generation, rank)
        copied = trace.path
        with contextlib.suppress(OSError):
            if path:
                copied = await in_thread(
                    partial(nccl_trace.copy, trace.path, path.parent), HANG_EVIDENCE
                )
        log.warning("rank %d: NCCL's flight recorder is in %s", rank, copied)

    # --- all nodes together ---------------------------------------------------------------

    def see(self, state: State) -> None:
        """Take note of the agent's new state."""
        self._state = state
        if state.view and (state.view.hang or state.view.steps):
            self._news.set()

    async def answer(self) -> None:
        """Ask as the coordinator, answer what is asked, and tell what was found."""
        while True:
            await self._news.wait()
            self._news.clear()
            state = self._state
            if state is None or state.view is None or not state.local.lease:
                continue
            await self._lead(state, state.view)
            if state.local.running == state.view.trains == self._generation:
                await self._say(state, state.view)
            self._hear(state, state.view)

    async def _lead(self, state: State, view: View) -> None:
        leads = view.round is not None and view.round.coordinator == state.local.lease
        if not leads or view.coverage != Everything():
            return
        asked = hangs.of_now(view)
        key = (asked.generation, asked.number) if asked else (0, 0)
        if self._question[0] != key:
            self._question = key, self._loop.time()
        following = hangs.lead(view, self._loop.time() - self._question[1])
        if following:
            txn = writes.put_hang(self._membership.keys, view, state.local, following)
            await self._membership.publish(txn)

    async def _say(self, state: State, view: View) -> None:
        """Publish where the workers are, where that was asked or is to be asked."""
        asked = hangs.of_now(view)
        number = asked.number if asked else 0
        if asked and not asked.line:
            if self._said < number and await self._publish(state, view, asked):
                self._said = number
            if self._said >= number:
                self._settle()
        elif self._suspicion is not None and self._said <= number:
            wanted = Hang(self._generation, number + 1, self._longest)
            if await self._publish(state, view, wanted):
                self._said = number + 1

    async def _publish(self, state: State, view: View, asked: Hang) -> bool:
        if asked.evidence:
            stand = [w for w, now in self._workers.activities() if _stands(w, now, asked.seconds)]
            await self._gather([w for w in stand if w.spec.rank not in self._evidence])
        self._published = self._standing(asked.seconds)
        ranks = tuple(self._rank_step(w, now) for w, now in self._workers.activities())
        steps = NodeSteps(state.local.lease, asked.number, ranks)
        txn = writes.put_steps(self._membership.keys, view, state.local, steps)
        return await self._membership.publish(txn)

    def _rank_step(self, worker: Worker, now: Activity) -> RankStep:
        rank, doing, what = worker.spec.rank, schema.RankDoing[now.doing.name], now.what
        found = self._evidence.get(rank)
        if now.doing is Doing.STEP and _is_traced(worker.pid):
            doing = schema.RankDoing.TRACED
        elif found and _reached(now) == (Doing.STEP, found.steps):
            doing = schema.RankDoing.WAIT if _in_collective(found.stack) else doing
            what = "stopped" if _status(worker.pid, "State") == "T" else _where(found.stack)
        return RankStep(rank, now.steps + 1, doing, round(now.seconds, 3), what, now.told)

    def _hear(self, state: State, view: View) -> None:
        """Tell the line once; one that was there before this agent is old."""
        found = hangs.of_now(view)
        key = (found.generation, found.number) if found and found.line else (0, 0)
        if self._heard is None or key <= self._heard or found is None:
            self._heard = max(key, self._heard or key)
            return
        self._heard = key
        log.log(logging.WARNING if found.alarm else logging.INFO, "%s", found.line)
        if not found.alarm:
            self._again = 2 * found.seconds
        restarts = state.limits is not None and state.limits.hang_action == "restart"
        if found.alarm and restarts and state.local.running == found.generation:
            self._restart(state, view, found)

    def _restart(self, state: State, view: View, found: Hang) -> None:
        """It is the agent of the rank that is behind, else of group rank 0, that ends the world."""
        part = view.part(state.local.lease)
        at = {worker.spec.rank: _reached(now) for worker, now in self._workers.activities()}
        stand = {rank for rank, place in at.items() if place == self._judged.get(rank)}
        if found.rank is None and part and part.group_rank == 0 and stand:
            self._workers.give_up(None, found.line, "")
        elif found.rank in stand:
            stack = self._evidence[found.rank].stack if found.rank in self._evidence else ""
            self._workers.give_up(found.rank, found.line, stack)


def _is_step(now: Activity) -> bool:
    """Whether it is in one that is watched: not in the first."""
    return now.doing is Doing.STEP and now.steps > 0


def _reached(now: Activity) -> Reached:
    return now.doing, now.steps


def _stands(worker: Worker, now: Activity, seconds: float) -> bool:
    """Whether it is in its step for about as long as the one that was found first."""
    long = now.seconds >= seconds / 2
    return now.doing is Doing.STEP and long and not _is_traced(worker.pid)


def _is_traced(pid: int) -> bool:
    return _status(pid, "TracerPid") not in ("", "0")


def _stack(output: bytes) -> str:
    """The Python stack of the main thread, if it has written that."""
    found = _STACK.findall(output.decode(errors="replace"))
    return found[-1][:_LONGEST] if found else ""


def _where(stack: str) -> str:
    """`train.py:9 in sleeps`, "" where that is not known."""
    frame = _FRAME.match(stack)
    return f"{Path(frame[1]).name}:{frame[2]} in {frame[3]}" if frame else ""


def _in_collective(stack: str) -> bool:
    """Whether it ends in what waits for other ranks, as far as Python knows."""
    frame = _FRAME.match(stack)
    if frame is None:
        return False
    path, function = frame[1], frame[3]
    ends = path.endswith("torch/nn/parallel/distributed.py") or "torch/distributed/" in path
    return ends or function == "_engine_run_backward"


def _ask_for_stacks(pid: int) -> bool:
    """Have its main thread write its Python stack to stderr, GIL or not; a stopped one could not.

    False if it has no handler for that signal, which would kill it.
    """
    caught = int(_status(pid, "SigCgt") or "0", 16)
    if not caught >> (DUMP_STACKS - 1) & 1:
        return False
    if _status(pid, "State") != "T":
        _signal_main_thread(pid)
    return True


def _signal_main_thread(pid: int) -> None:
    """Not the process: a thread that has just begun may take that, and has no stack to write."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # since glibc 2.30
        libc.tgkill(pid, pid, int(DUMP_STACKS))
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_STACKS)


async def _await_stacks(asked: list[Worker], known: dict[int, bytes]) -> None:
    """Until they have written them, and write no more; what is stopped writes nothing."""
    write = [worker for worker in asked if _status(worker.pid, "State") != "T"]
    last = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_STACKS):
            while True:
                now = {worker.pid: worker.output.err.tail() for worker in write}
                told = (known[pid] != output and _stack(output) for pid, output in now.items())
                if now == last and all(told):
                    return
                last = now
                await asyncio.sleep(_LOOK)


async def _ask_for_traces(hanging: list[Worker]) -> list[tuple[int, nccl_trace.Dump]]:
    """Of those in which NCCL's flight recorder is on, by rank."""
    specs = [worker.spec for worker in hanging if nccl_trace.is_on(worker.spec.env)]

    def ask() -> list[tuple[int, nccl_trace.Dump]]:
        asked = ((spec.rank, nccl_trace.ask(spec.env, spec.rank)) for spec in specs)
        return [(rank, trace) for rank, trace in asked if trace]

    with contextlib.suppress(TimeoutError):
        return await in_thread(ask, HANG_ASK) if specs else []
    return []


def _status(pid: int, name: str) -> str:
    """A line of /proc/PID/status; "" when the process is gone."""
    lines = _text_of(Path(f"/proc/{pid}/status")).splitlines()
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")


def _write_file(path: Path, pid: int, rank: int, output: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    head = f"rank {rank}, pid {pid}, {now}\n\n--- its stderr, with the Python stacks\n"
    rest = "\n".join(["", *_kernel_state(pid)])
    with path.open("ab") as file:
        file.write(head.encode() + output + rest.encode() + b"\n")


def _kernel_state(pid: int) -> Iterator[str]:
    """What each thread of the worker, and of what it has started, does in the kernel."""
    yield "--- threads: process, thread, name, state, where it waits, system call"
    for process in [pid, *(p for p in members_of(pid) if p != pid)][:_PROCESSES]:
        with contextlib.suppress(OSError):
            for task in sorted(Path(f"/proc/{process}/task").iterdir())[:_THREADS]:
                with contextlib.suppress(OSError):
                    yield f"{process} {task.name} {_thread(task)}"


def _thread(task: Path) -> str:
    stat = (task / "stat").read_text(errors="replace")  # a name may be cut inside a character
    name, _, rest = stat.partition("(")[2].rpartition(")")
    state = rest.split()[0]
    found = [name, state, _text_of(task / "wchan") or "-", _text_of(task / "syscall") or "-"]
    stack = _text_of(task / "stack")  # root's only
    return " ".join(found) + "".join(f"\n    {line}" for line in stack.splitlines())


def _text_of(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_KERNEL).strip()
    except OSError:
        return ""
