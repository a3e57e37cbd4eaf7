"""The record of a run on one node: as its agent tells it, and as the program that asked sees it."""

from dataclasses import dataclass
from typing import Any

from msgspec import Struct


class WorkerFailure(Struct, frozen=True, kw_only=True):
    """A worker that failed."""

    generation: int
    rank: int
    local_rank: int
    node: str
    pid: int
    exitcode: int  # negative for a signal, 0 for a hang
    message: str  # its traceback, or what else is known of the cause
    error_file: str  # torch's record of its exception; "" if there is none on this machine
    at: str


class RunRecord(Struct):
    """The record that an agent keeps: what it went through, and how it ended."""

    exit_code: int = 0
    error: str = ""
    outcome: str = ""  # one of RunResult's; "" until then
    reason: str = ""
    generation: int = 0  # of the job's last world
    generations: list[int] = []  # of the worlds that this node was in
    restarts: int = 0  # that the job has used of its budget
    failures: list[WorkerFailure] = []
    cause: int = -1  # the index of the failure that ended the job; -1 without one


@dataclass(frozen=True)
class RunResult:
    """The way a job went, as this node saw it."""

    # succeeded, failed, stopped; left: this node left and the job may go on; or over: it had
    # succeeded before, and nothing was run.
    outcome: str
    reason: str
    exit_code: int  # the launcher's
    generations: tuple[int, ...]  # of the worlds that this node was in, in order
    restarts: int  # that were used of the job's budget
    failures: tuple[WorkerFailure, ...]  # of this node, in order, and the cause if it is another's
    cause: WorkerFailure | None  # the failure that ended the job
    return_values: dict[int, Any]  # by rank, of this node's last generation; {} without success
