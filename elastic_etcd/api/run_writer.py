"""The follower that keeps the record of a run for the Python program that has started the agent."""

from typing import Self

from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.core.lifecycle import Event, JobEnded, State, WorkerEnded, WorkersHang
from elastic_etcd.core.schema import Failure, Outcome
from elastic_etcd.protocol.run_record import RunRecord, WorkerFailure


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
            self.record.restarts = state.view.round.restarts
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
