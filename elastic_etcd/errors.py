"""The one error tree. Each message says what happened, where, and what to do about it.

    ElasticEtcdError
    ├── UsageError            a flag, a value or a file that the user gave is wrong
    │   └── WrongHere         on another node, or at another start, it may be right
    ├── EtcdError
    │   ├── EtcdUnreachable   no endpoint answered in time
    │   ├── EtcdDenied        password, permission or certificate refused
    │   ├── EtcdRefused       a request that etcd will not serve (quota, size)
    │   └── ForkedClient      a client used in a process that forked after it was made
    ├── AgentGone             a worker's agent does not answer any more
    ├── StaleGeneration       a worker's generation is not the job's current one
    ├── MalformedState        a snapshot, or a file of one, is not what was written (a ValueError)
    ├── PiecesLost            a part of the sharded state was on nodes that are all gone
    ├── NewerFormat           a newer elastic_etcd has written to the job
    ├── UnfitNode             the command of --health-check says that this node is not fit to train
    ├── RendezvousTimeout     fewer than min nodes for longer than --join-timeout
    ├── NotInTime             what was asked of a job, and waited for, has not happened yet
    └── TrainingFailed        a worker failed and no restart was allowed
        ├── BudgetUsedUp      a worker failed once more than --max-restarts
        └── NoProgress        restarts came no further: --stop-after-no-progress

An agent's exit status is the error's `exit_code`; docs/failures.md lists them.
"""


class ElasticEtcdError(Exception):
    """Anything this program tells its user; `exit_code` is the process's exit status.

    A worker that is the cause is told as torch's error files have it: (what it raised, its call
    stack, when in ISO 8601, its exit code).
    """

    exit_code = 1
    cause: tuple[str, str, str, int] | None = None


class UsageError(ElasticEtcdError):
    """A flag, a value or a file that the user gave is wrong."""

    exit_code = 2


class WrongHere(UsageError):
    """A wrong use that another node, or another start, may mend: too little memory, for one.

    A worker that ends by it is started again, as after any other error; a UsageError ends the job.
    """


class EtcdError(ElasticEtcdError):
    """Something between this program and etcd."""

    exit_code = 5


class EtcdUnreachable(EtcdError):
    """No endpoint answered in time."""


class EtcdDenied(EtcdError):
    """etcd refused the password, the permission or the certificate."""


class EtcdRefused(EtcdError):
    """etcd answered that it will not serve this request (quota, size, unknown lease)."""


class ForkedClient(EtcdError):
    """A client was used in a process that forked after the client was made."""


class AgentGone(ElasticEtcdError):
    """The agent that started this worker does not answer any more."""


class StaleGeneration(ElasticEtcdError):
    """This worker's generation is not the job's current one: others go on without it."""


class MalformedState(ElasticEtcdError, ValueError):
    """A snapshot, or a file of one, is not what was written."""


class PiecesLost(ElasticEtcdError):
    """A part of the last commit of a sharded state is on no node that is left."""


class TrainingFailed(ElasticEtcdError):
    """A worker failed and no restart was allowed."""

    exit_code = 1


class BudgetUsedUp(TrainingFailed):
    """A worker failed once more than --max-restarts allows."""

    exit_code = 3


class NoProgress(TrainingFailed):
    """Restarts came no further: a scheduler is not to try again, which would only repeat that."""

    exit_code = 9


class NewerFormat(ElasticEtcdError):
    """A newer elastic_etcd has written to the job: a scheduler may try again with a newer image."""

    exit_code = 7


class UnfitNode(ElasticEtcdError):
    """The command of --health-check says that this node is not fit to train."""

    exit_code = 8


class RendezvousTimeout(ElasticEtcdError):
    """Fewer than the minimum of nodes for longer than --join-timeout."""

    exit_code = 4


class NotInTime(ElasticEtcdError):
    """The job has not done yet what was asked of it and waited for."""

    exit_code = 4
