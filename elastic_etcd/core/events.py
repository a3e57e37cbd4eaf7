"""What happens to an agent (events) and what it then does (actions), as plain values."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from elastic_etcd.core.rules import Decision
from elastic_etcd.core.values import Failure, Report, Round
from elastic_etcd.core.view import View


class Grace(Enum):
    """Why workers are stopped; how long they get before SIGKILL depends on it."""

    FAILURE = "failure"
    CHANGE = "change"
    LEAVE = "leave"


# --- events -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Viewed:
    """A newer view of the job."""

    view: View


@dataclass(frozen=True, slots=True)
class Joined:
    """The member key is written: see Me for what the fields are."""

    run: str
    spec: int
    lease: int
    created: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The server says that the lease is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wrote:
    """The write in flight was answered; `ok` is whether its fence held."""

    ok: bool


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker exited; `failure` is None for exit code 0.

    `by_peer`: it says itself that it failed because a peer was gone.
    """

    generation: int
    failure: Failure | None
    by_peer: bool = False


@dataclass(frozen=True, slots=True)
class Emptied:
    """No process of that generation's workers is left on this node."""

    generation: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """SIGTERM or SIGINT to the agent."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """The armed timer is due."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Going on is impossible: an error for the user, or why the job is over for this node."""

    why: Exception | str


Event: TypeAlias = (
    Viewed | Joined | LeaseLost | Wrote | WorkerEnded | Emptied | Signalled | Ticked | Broken
)


# --- actions ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """Put a decision, a report or (None) the mark of leaving into etcd; answered by Wrote."""

    what: Decision | Report | None
    lease: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of this final round."""

    round: Round


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workers; answered by Emptied."""

    grace: Grace


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Join again, as another incarnation; answered by Joined."""


@dataclass(frozen=True, slots=True)
class Exit:
    """End the agent; no worker is alive. `why` is None after a signal, else what ended it."""

    why: str | Exception | None


@dataclass(frozen=True, slots=True)
class Arm:
    """Send Ticked at `at` on the local monotonic clock; replaces the timer before it."""

    at: float | None


@dataclass(frozen=True, slots=True)
class Say:
    """A decision whose reason changed, for the log."""

    decision: Decision


Action: TypeAlias = Write | Start | Stop | Rejoin | Exit | Arm | Say
