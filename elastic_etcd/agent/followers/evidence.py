"""The evidence of a hang: a worker's Python stacks, its threads in the kernel, and NCCL's record.

NCCL's flight recorder knows which collectives have begun, and which have ended. A thread of torch's
writes its record into a file when somebody writes to a pipe. It is asked only where the user has
turned both on, by torch's own variables: a worker that can't make its pipe ends.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.agent.worker import Worker
from elastic_etcd.agent.workers import Workers
from elastic_etcd.protocol.activity import DUMP_STACKS, Doing
from elastic_etcd.system.processes import members_of
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import HANG_ASK, HANG_EVIDENCE, HANG_STACKS

_LOOK = 0.2  # seconds between two looks at what is being written
_PROCESSES, _THREADS = 64, 256  # of a worker, that are looked at
_TAIL = 1 << 15
_LONGEST = 1 << 13  # characters of a stack that is kept
_KERNEL = 1 << 12  # bytes of each file of a thread's
# faulthandler writes this of the thread that takes the signal, which is the main one.
_STACK = re.compile(r"^Stack [^\n]*\n((?:  File [^\n]*(?:\n|\Z))+)", re.MULTILINE)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_LIBRARIES = re.compile("/(torch|elastic_etcd/train)/")  # a script's calls end there
_NCCL_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# The name of now, and of before.
_NCCL_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_MOST = 1 << 24  # bytes of its record that are copied

Stamp: TypeAlias = tuple[int, int] | None

log = logging.getLogger(__name__)


class Evidence(NamedTuple):
    """A worker that stood: after how many steps, its Python stack, and what it said that it did."""

    steps: int
    stack: str
    doing: Doing = Doing.STEP
    file: str = ""  # that has it, and more

    @property
    def place(self) -> str:
        """`train.py:9 in sleeps`, and what it called of torch; "" where that is not known."""
        frames = [frame for line in self.stack.splitlines() if (frame := _FRAME.match(line))]
        if not frames:
            return ""
        last = frames[0]
        own = next((frame for frame in frames if not _LIBRARIES.search(frame[1])), last)
        called = f" ({last[3]})" if own is not last else ""
        return f"{Path(own[1]).name}:{own[2]} in {own[3]}{called}"

    @property
    def in_collective(self) -> bool:
        """Whether it ends in what waits for other ranks, as far as Python knows."""
        frame = _FRAME.match(self.stack)
        if frame is None:
            return False
        path, function = frame[1], frame[3]
        ends = path.endswith("torch/nn/parallel/distributed.py") or "torch/distributed/" in path
        ends = ends and "torch/distributed/checkpoint/" not in path  # it may write for itself
        return ends or function == "_engine_run_backward"


async def gather(
    hanging: list[Worker],
    workers: Workers,
    logs: Logs,
    known: dict[int, Evidence],
    one_at_a_time: asyncio.Lock,
) -> None:
    """Have written where they stand: into a file for each, and into their own output.

    `known` gets the evidence by rank, as soon as it is there, and is not gathered again.
    """
    generation = workers.generation
    async with one_at_a_time:
        hanging = [worker for worker in hanging if worker.spec.rank not in known]
        if not hanging:
            return
        tails = {worker.pid: worker.output.err.tail() for worker in hanging}
        asked = {worker.pid for worker in hanging if _ask_for_stacks(worker.pid)}
        traces = await _ask_for_traces(hanging)
        await _await_stacks([w for w in hanging if w.pid in asked], tails)
        now = {worker.pid: activity for worker, activity in workers.activities()}
        hanging = [worker for worker in hanging if worker.pid in now]
        for worker in hanging:
            output, at = worker.output.err.tail(), now[worker.pid]
            if at.doing is Doing.COMMIT:  # one that stands counts as a step
                at = at._replace(doing=Doing.STEP)
            new = output if output != tails[worker.pid] else b""
            known[worker.spec.rank] = Evidence(at.steps, _stack(new), at.doing)
            if at.doing is Doing.STEP:
                log.warning(
                    "rank %d is in step %d for %.0f s; its slowest of late took %.1f s "
                    "(--hang-timeout)",
                    *(worker.spec.rank, at.steps + 1, at.seconds, at.slowest),
                )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_EVIDENCE):
            for worker in hanging:
                path = logs.evidence_file(generation, worker.spec.rank)
                file = await _write_evidence(worker, path, has_handler=worker.pid in asked)
                if found := known.get(worker.spec.rank):  # it has not gone on
                    known[worker.spec.rank] = found._replace(file=file)
            for rank, trace in traces:
                await _collect(rank, trace, logs.evidence_file(generation, rank))


async def _write_evidence(worker: Worker, path: Path | None, *, has_handler: bool) -> str:
    """The file that has it, "" if there is none."""
    rank, output = worker.spec.rank, worker.output.err.tail()[-_TAIL:]
    stacks = "" if has_handler else "; it has no handler for stacks"
    if path is None:
        log.warning("rank %d: its stacks are in its stderr%s", rank, stacks)
        return ""
    try:
        await in_thread(partial(_write_file, path, worker.pid, rank, output), HANG_EVIDENCE)
    except OSError as error:  # a TimeoutError is one
        log.warning("rank %d: nothing can be written: %s", rank, error)
        return ""
    log.warning("rank %d: where it stands is in %s%s", rank, path, stacks)
    return str(path)


async def _collect(rank: int, trace: "Trace", path: Path | None) -> None:
    """Copy NCCL's record beside `path` when it has been written: it has changed, and is still."""
    now, last = trace.before, None
    while now == trace.before or now != last:  # is not there, or grows
        await asyncio.sleep(_LOOK)
        now, last = await in_thread(partial(_stamp_of, trace.path), HANG_EVIDENCE), now
    copied = trace.path
    with contextlib.suppress(OSError):
        if path:
            copied = await in_thread(partial(_copy_trace, trace.path, path.parent), HANG_EVIDENCE)
    log.warning("rank %d: NCCL's flight recorder is in %s", rank, copied)


# --- Python and the kernel ----------------------------------------------------------------


def _stack(output: bytes) -> str:
    """The Python stack of the main thread, if it has written that."""
    found = _STACK.findall(output.decode(errors="replace"))
    return found[-1][:_LONGEST] if found else ""


def _ask_for_stacks(pid: int) -> bool:
    """Have its main thread write its Python stack to stderr, GIL or not; a stopped one could not.

    False if it has no handler for that signal, which would kill it.
    """
    caught = int(status(pid, "SigCgt") or "0", 16)
    if not caught >> (DUMP_STACKS - 1) & 1:
        return False
    if status(pid, "State") != "T":
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
    write = [worker for worker in asked if status(worker.pid, "State") != "T"]
    last = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HANG_STACKS):
            while True:
                now = {worker.pid: worker.output.err.tail() for worker in write}
                written = (known[pid] != output and _stack(output) for pid, output in now.items())
                if now == last and all(written):
                    return
                last = now
                await asyncio.sleep(_LOOK)


def status(pid: int, name: str) -> str:
    """A line of /proc/PID/status; "" when the process is gone."""
    lines = _text_of(Path(f"/proc/{pid}/status"), -1).splitlines()  # groups may be many
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "")


def _write_file(path: Path, pid: int, rank: int, output: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    head = f"rank {rank}, pid {pid}, {now}\n\n--- its stderr, with the Python stacks\n"
    rest = "\n".join(["", *_kernel_state(pid)])
    with path.open("ab") as file:
        file.write(head.encode() + output + rest.encode() + b"\n")


def _kernel_state(pid: int) -> Iterator[str]:
    """The place in the kernel of each thread of the worker, and of all that it has started."""
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


def _text_of(path: Path, longest: int = _KERNEL) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(longest).strip()
    except OSError:
        return ""


# --- NCCL's flight recorder ---------------------------------------------------------------


class Trace(NamedTuple):
    """A file that is being written, and what it was like before."""

    path: Path
    before: Stamp


async def _ask_for_traces(hanging: list[Worker]) -> list[tuple[int, Trace]]:
    """The traces of those in which NCCL's flight recorder is on, by rank."""
    specs = [worker.spec for worker in hanging]

    def ask() -> list[tuple[int, Trace]]:
        asked = ((spec.rank, _ask_for_trace(spec.env, spec.rank)) for spec in specs)
        return [(rank, trace) for rank, trace in asked if trace]

    with contextlib.suppress(TimeoutError):
        return await in_thread(ask, HANG_ASK)
    return []


def _ask_for_trace(env: Mapping[str, str], rank: int) -> Trace | None:
    """Have it write; None where it is off, or where nobody reads its pipe."""
    pipe, file = env.get(_NCCL_PIPE), next(filter(None, map(env.get, _NCCL_FILES)), None)
    if not pipe or not file:
        return None
    path = Path(f"{file}{rank}")
    asked = Trace(path, _stamp_of(path))
    try:
        fd = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return asked if stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, b"1") else None
    except OSError:  # it is full
        return None
    finally:
        os.close(fd)


def _stamp_of(path: Path) -> Stamp:
    """Its time and size, which change when it is written; None where it is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _copy_trace(path: Path, folder: Path) -> Path:
    """Copy it to `folder`, unless it is too large; gives where it is. Raises OSError."""
    if path.stat().st_size > _MOST:
        return path
    target = folder / "nccl_trace"
    with path.open("rb") as file:
        target.write_bytes(file.read(_MOST))
    return target
