"""One machine as the model sees it, and what may still go wrong.

Deep values (an agent's state, a view, a Txn) are kept once and stand here as numbers, so that
nodes are tuples of small integers, which are cheap to make, to compare and to look up.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

INCARNATIONS = 16


class Numbers(Generic[T]):
    """Each distinct value once, by a number from 1 on; 0 stands for none."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._known: dict[T, int] = {}

    def of(self, value: T) -> int:
        number = self._known.get(value)
        if number is None:
            self.values.append(value)
            number = self._known[value] = len(self.values)
        return number

    def __getitem__(self, number: int) -> T:
        return self.values[number - 1]


class Node(NamedTuple):
    """One machine: its agent's state, its workers, and what is on the way to it."""

    number: int
    incarnation: int = 0
    state: int = 0  # of the agent; 0: it is gone
    lease: int = 0  # of this incarnation, while the server has it
    stale: int = 0  # of the incarnation before, while the server has it
    workers: int = 0  # generation of the live workers
    acked: int = 0  # generation that this lease has acked, known or not to the agent
    txn: int = 0  # on its way to the server
    late: tuple[int, int] | None = None  # a copy of one still on its way, and whose lease
    answer: bool | None = None  # to a Txn, on its way to the agent
    unread: int = 0  # a view that came before the agent was stopped
    told: bool = True  # whether the agent knows that its lease is gone
    joining: bool = False
    out: bool = False  # left for good
    hung: bool = False

    @property
    def name(self) -> str:
        return f"n{self.number}"


def owner(lease: int) -> int:
    """The number of the node whose lease this is."""
    return (lease - 1) // INCARNATIONS


class Faults(NamedTuple):
    """How often each may still happen."""

    crash: int = 0  # a node dies with its workers
    back: int = 0  # a dead node comes back
    fail: int = 0  # a worker exits non-zero
    early: int = 0  # the same, by an error that is always the same, and before any step
    poison: int = 0  # the same, each time at the same place of the training
    peer: int = 0  # a worker exits non-zero and says that a peer was gone
    done: int = 0  # a node's workers finish
    expire: int = 0  # the lease of a live agent ends (cut off, revoked)
    leave: int = 0  # SIGTERM to an agent
    lost: int = 0  # a Txn is applied, its answer is lost and the client tries again
    late: int = 0  # a Txn reaches the server a second time, whenever that may be
    slow: int = 0  # a Txn is applied, its answer comes whenever that may be
    stop: int = 0  # SIGSTOP to an agent that has not looked at its newest view; then SIGCONT
    long: int = 0  # an agent has seen a world last for half of --restart-window
    tired: int = 0  # a live agent is not ready, or does not leave, in time: a world is without it
    hang: int = 0  # an agent does nothing any more, but its lease lives
    silent: int = 0  # etcd does not answer an agent's keepalive, until it does
    elastic: int = 0  # a node's workers say that they recover in process
    finish: int = 0  # a node's training is over, and its workers still run
    newer: int = 0  # an agent of a newer format version writes a key
    drain: int = 0  # somebody drains a node, and may undrain it
    halt: int = 0  # somebody stops the job
    fewer: int = 0  # somebody scales the job to the smallest number of nodes
    more: int = 0  # somebody scales the job to the largest number of nodes
    restore: int = 0  # etcd goes back to what it held at any earlier time

    def __str__(self) -> str:
        """Those that may happen: "crash=1 back=1"."""
        return " ".join(f"{name}={n}" for name, n in self._asdict().items() if n)


CALM = ""  # no fault: what happens sooner or later
FREE = "free"  # what may happen and may not, but costs nothing


class Move(NamedTuple):
    """One transition; `fault` names the budget that it takes from, or is CALM or FREE."""

    label: str
    store: int
    node: Node
    fault: str = CALM
