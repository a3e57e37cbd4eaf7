"""The agent beside a Python program that has called `elastic_launch` (launcher.py).

`python -m elastic_etcd.api.child PID FD FOLDER FLAG...` is the launcher with these flags. It leaves
the job when the process PID ends, and removes FOLDER then. It follows the run (`RunWriter`), and
writes its record into the file FD.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from elastic_etcd import launch
from elastic_etcd.core.lifecycle import Event, JobEnded, State, WorkerEnded, WorkersHang
from elastic_etcd.core.schema import Failure, Outcome
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.protocol.run_record import RunRecord, WorkerFailure
from elastic_etcd.system import kernel
from elastic_etcd.system.startup import open_standard_streams, reset_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elastic_etcd.agent.output.logs import Logs


class RunWriter:
    """Keeps the `record` of a run up to date."""

    def __init__(self) -> None:
        self.record = RunRecord()
        self._logs: Logs | None = None
        self._final = 0  # the job's last world, as far as it was seen

    def follow(self, logs: Logs) -> Self:
        """From here on error files are looked for there; those of failed workers stay."""
        self._logs = logs
        return self

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note of the worlds, of the workers that fail, and of how the job has ended."""
        if state.view:
            self._final = max(self._final, state.view.ledger.final)  # it goes with the job
        running = state.local.running
        if running and running != before.local.running:
            assert state.view
            assert state.view.round
            self.record.generations.append(running)
            self.record.restarts = state.view.restarts
        match event:
            case WorkerEnded(generation, Failure() as failure) | WorkersHang(
                generation, failure
            ) if generation == before.local.running and not before.local.stopping:
                assert self._logs
                self._logs.keep()
                error_file = self._logs.error_file(generation, failure.rank)
                self.record.failures.append(_worker_failure(generation, failure, error_file))
            case JobEnded(outcome):
                self._write_outcome(outcome)

    def _write_outcome(self, outcome: Outcome) -> None:
        """The job is over. The cause may be a worker of another node.

        The outcome's generation may be a claim's, of which no world has come; a final one after it
        is of another run.
        """
        self.record.outcome, self.record.reason = outcome.state, outcome.reason
        self.record.generation = min(self._final, outcome.generation)
        cause = outcome.failure
        if cause is None:
            return
        same = (cause.node, cause.pid, cause.at)
        known = [f for f in self.record.failures if (f.node, f.pid, f.at) == same]
        if not known:
            self.record.failures.append(_worker_failure(self.record.generation, cause, ""))
            known = self.record.failures[-1:]
        self.record.cause = self.record.failures.index(known[-1])


def _worker_failure(generation: int, failure: Failure, error_file: str) -> WorkerFailure:
    return WorkerFailure(
        generation=generation,
        rank=failure.rank,
        local_rank=failure.local_rank,
        node=failure.node,
        pid=failure.pid,
        exitcode=failure.code,
        message=failure.hang or failure.message,
        error_file=error_file,
        at=failure.at,
    )


def main(argv: Sequence[str]) -> int:
    """Be the agent until the job, or the program, has ended; gives the exit code."""
    program, record_fd, folder = int(argv[0]), int(argv[1]), Path(argv[2])
    open_standard_streams()
    reset_signals()
    run_writer = RunWriter()
    record = run_writer.record
    # Until the agent handles it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        kernel.signal_at_parents_death(signal.SIGTERM)  # of the thread that waits for this process
        if os.getppid() != program:
            sys.exit(128 + signal.SIGTERM)
        record.exit_code = launch.run(argv[3:], _environment(), follow=run_writer.follow)
        if not record.outcome:
            record.outcome = "left" if record.exit_code else "over"
            record.reason = "this node has left" if record.exit_code else "it had succeeded before"
    except ElasticEtcdError as error:
        record.exit_code, record.error = error.exit_code, str(error)
    except BaseException as error:
        record.exit_code, record.error = 1, f"the agent has ended: {type(error).__name__}: {error}"
        raise
    finally:
        with open(record_fd, "wb") as file:
            file.write(msgspec.json.encode(record))
        if os.getppid() != program:  # nobody else would
            shutil.rmtree(folder, ignore_errors=True)
    return record.exit_code


def _environment() -> dict[str, str]:
    """Without what is for a command line, or for scripts: LaunchConfig says it, and this Python."""
    ours = os.environ.items()
    return {k: v for k, v in ours if not k.startswith("PET_") and k != "PYTHON_EXEC"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
