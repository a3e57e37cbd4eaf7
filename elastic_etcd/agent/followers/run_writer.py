"""How a run goes on this node, for the Python program that has started its agent (launcher.py).

Loaded for such a program only.
"""

from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.core.lifecycle import Event, State, WorkerEnded, WorkersHang
from elastic_etcd.core.schema import Failure, Outcome
from elastic_etcd.protocol.run_record import Ran, WorkerFailure


class Account:
    """Keeps `ran` up to date. The agent says what happens to it, and how the job has ended."""

    def __init__(self) -> None:
        self.ran = Ran()
        self._logs: Logs | None = None
        self._final = 0  # the job's last world, as far as it was seen

    def follow(self, logs: Logs) -> None:
        """From here on error files are looked for there; those of failed workers stay."""
        self._logs = logs

    def see(self, before: State, event: Event, now: State) -> None:
        """The agent was `before`, and is `now` after this event."""
        if now.view:
            self._final = max(self._final, now.view.ledger.final)  # it goes with the job
        running = now.local.running
        if running and running != before.local.running:
            assert now.view
            assert now.view.round
            self.ran.generations.append(running)
            self.ran.restarts = now.view.round.restarts
        if before.local.stopping:  # what ends then was made to
            return
        match event:
            case WorkerEnded(generation, Failure() as failure) | WorkersHang(
                generation, failure
            ) if generation == before.local.running:
                self._add(generation, failure)

    def end(self, outcome: Outcome) -> None:
        """The job is over. The cause may be a worker of another node.

        The outcome's generation may be a claim's, of which no world has come; a final one after it
        is of another run.
        """
        self.ran.outcome, self.ran.reason = outcome.state, outcome.reason
        self.ran.generation = min(self._final, outcome.generation)
        cause = outcome.failure
        if cause is None:
            return
        known = [f for f in self.ran.failures if _is_same(f, cause)]
        if not known:
            self.ran.failures.append(_told(self.ran.generation, cause, ""))
            known = self.ran.failures[-1:]
        self.ran.cause = self.ran.failures.index(known[-1])

    def _add(self, generation: int, failure: Failure) -> None:
        assert self._logs
        self._logs.keep()
        error_file = self._logs.error_file(generation, failure.rank)
        self.ran.failures.append(_told(generation, failure, error_file))


def _is_same(told: WorkerFailure, failure: Failure) -> bool:
    return (told.node, told.pid, told.at) == (failure.node, failure.pid, failure.at)


def _told(generation: int, failure: Failure, error_file: str) -> WorkerFailure:
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
