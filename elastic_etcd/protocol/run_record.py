"""How a run went on one node: as its agent tells it, and as the program that asked sees it."""

from dataclasses import dataclass
from typing import Any

from msgspec import Struct


class WorkerFailure(Struct, frozen=True, kw_only=True):
    """A worker that failed. `exitcode` is negative for a signal, and 0 for one that hung.

    `message` is its traceback, or what else is known of the cause. `error_file` holds torch's
    record of its exception; "" if there is none on this machine.
    """

    generation: int
    rank: int
    local_rank: int
    node: str
    pid: int
    exitcode: int
    message: str
    error_file: str
    at: str


class Ran(Struct):
    """How an agent ended, and what it went through.

    `outcome` is succeeded, failed or stopped, "left" where the job may go on without this node, and
    "" where it has not come so far; `generation` is that of the job's last world. `cause` is the
    index of the failure that ended the job, -1 without one.
    """

    exit_code: int = 0
    error: str = ""
    outcome: str = ""
    reason: str = ""
    generation: int = 0
    generations: list[int] = []
    restarts: int = 0
    failures: list[WorkerFailure] = []
    cause: int = -1


@dataclass(frozen=True)
class RunResult:
    """How a job went, as this node saw it.

    `outcome` is succeeded, failed or stopped, or "left" where this node left and the job may go on;
    `reason` says why, and `exit_code` is the launcher's. `generations` are the worlds that this
    node was in, in order, `restarts` is how much of the job's budget was used. `failures` are the
    workers of this node that failed, in order, and the job's `cause`, if that is another node's.
    `return_values` are those of this node's ranks in the last generation, {} unless it succeeded.
    """

    outcome: str
    reason: str
    exit_code: int
    generations: tuple[int, ...]
    restarts: int
    failures: tuple[WorkerFailure, ...]
    cause: WorkerFailure | None
    return_values: dict[int, Any]
