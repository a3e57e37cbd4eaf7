"""torch's ChildFailedError for a job of ours. A file of its own, because it loads torch."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import errors

from elastic_etcd.errors import TrainingFailed

if TYPE_CHECKING:
    from elastic_etcd.protocol.run_record import RunResult, WorkerFailure


class ChildFailedError(errors.ChildFailedError, TrainingFailed):  # type: ignore[misc] # untyped
    """A worker failed, and no restart was left.

    `failures` are torch's, by rank: those of the last generation, the root cause first. `result`
    has all that is known of the run.
    """

    def __init__(
        self, name: str, failures: dict[int, errors.ProcessFailure], result: RunResult
    ) -> None:
        super().__init__(name, failures)
        self.result = result


def child_failed(name: str, result: RunResult) -> ChildFailedError:
    """The error of a run that failed by `result.cause`."""
    cause = result.cause
    assert cause is not None
    of_last = [f for f in result.failures if f.generation == cause.generation and f != cause]
    failures = {f.rank: _process_failure(f) for f in (cause, *of_last)}
    return ChildFailedError(name, failures, result)


def _process_failure(failed: WorkerFailure) -> errors.ProcessFailure:
    """Torch's account of a failure."""
    read = partial(errors.ProcessFailure, failed.local_rank, failed.pid, failed.exitcode)
    try:
        found = read(failed.error_file)
    except Exception:  # noqa: BLE001 - a file that was cut off raises whatever torch's reader meets
        found = read("")
    at = int(datetime.fromisoformat(failed.at).timestamp())
    found.timestamp = at  # in the order in which they ended
    if not Path(found.error_file).exists() and failed.message:
        extra = {"py_callstack": failed.message, "timestamp": str(at)}
        last_line = failed.message.strip().splitlines()[-1]
        found.message = {"message": last_line, "extraInfo": extra}
    return found
