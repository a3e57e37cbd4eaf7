"""The keys of a job in etcd: their names, and what each of them holds.

Every value is a JSON object with "v": 2 and sorted keys, so that
`etcdctl get --prefix /elastic_etcd/JOB` reads well. Anybody with the right to write may have
written it: `decode` ignores fields that it does not know and refuses what is not as described
here, by the field's path. docs/contributing/keys.md shows each value with an example; times in them
are for people to read only.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from elastic_etcd.core import words
from elastic_etcd.times import GRACE_LEAVE, STOP_PATIENCE, UNKILLABLE

VERSION = 2
_READ = (1, VERSION)  # the versions of values that are read; only a round and a ledger differ
PREFIX = "/elastic_etcd"
# A job or a part of a prefix that is called so could lie among another job's keys.
PARTS = frozenset(
    (
        *("spec", "members", "ledger", "round", "world", "acks", "reports", "history", "outcome"),
        *("hang", "steps", "wanted", "watched", "paces"),
        *("step_times", "stragglers", "divergence", "unfit"),
    )
)
LARGEST = (1 << 63) - 1  # etcd's own numbers have 63 bits
LONGEST = 1 << 16  # characters of a text
MOST_WORKERS = 4096  # of one node
MOST_PAGES = 120  # of a world: etcd takes 128 operations in one Txn
ON_A_PAGE = 64  # participants at most, until there are MOST_PAGES
MOST_SCALED = 1024  # on a page, where a run has been scaled since it was begun
MOST_SIZES = 1024  # that a world may have
MOST_DRAINS = 1024
MOST_STRAGGLERS = 1024
MOST_DIVERGENCES = 8  # lines of a world
MOST_STALLED = 20  # failures in a row without progress, which end a job
MOST_FAILURES = MOST_STALLED + 1  # that are remembered, the one that came furthest among them
MOST_PAST = 32  # and beside them so many nodes that went, together
MOST_INDICES = 32  # of a batch
MOST_SECONDS = 1e12

_ADDRESS = r"\A[A-Za-z0-9.:%_-]{1,255}\Z"
_IP = r"\A[0-9A-Fa-f.:]{2,45}\Z"
_NONCE = r"\A[0-9a-f]{32}\Z"
_LINE = r"\A[^\n]*\Z"
_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
# One text for one number: else two keys could be the same member's.
_LEASE = re.compile(r"[0-9a-f]{16}")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,17}")

V = TypeVar("V", bound="Value")


# --- names --------------------------------------------------------------------------------


def valid_job(job: str) -> bool:
    """Whether `job` can be a path segment: 1 to 128 letters, digits, '.', '_' or '-'.

    None of PARTS is one: the root of one job is then never inside a folder of another's.
    """
    return _JOB.fullmatch(job) is not None and job not in (".", "..") and job not in PARTS


def valid_prefix(prefix: str) -> bool:
    """Whether `prefix` is a path of such segments: it starts with '/' and ends without."""
    whole = _PREFIX.fullmatch(prefix) is not None
    return whole and all(map(valid_job, prefix[1:].split("/")))


def valid_address(address: str) -> bool:
    """Whether `address` may be a master's: a name, an IPv4 or an IPv6 address."""
    return re.match(_ADDRESS, address) is not None


def wrong_label(host: str) -> str:
    """Says why no resolver takes such a name, which raises UnicodeError where it is looked up."""
    if all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        return ""
    return "a part of the host name is empty or longer than 63 characters: is a variable not set?"


def hexed(lease: int) -> str:
    """A lease id as etcdctl prints it."""
    return format(lease, "016x")


def unhexed(text: Any) -> int:
    """The lease id that `hexed` wrote. Raises ValueError for anything else."""
    if type(text) is not str or not _LEASE.fullmatch(text):
        raise ValueError("a lease is no hexadecimal number of 16 digits")
    lease = int(text, 16)
    if not 0 < lease <= LARGEST:
        raise ValueError("a lease is out of range")
    return lease


def decimal(text: str) -> int | None:
    """A generation in a key's name; None for what this program does not write."""
    return int(text) if _DECIMAL.fullmatch(text) else None


class _Below:
    """A key, or a folder of keys, that each job has at this path below its root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, keys: "Keys", _: type) -> str:
        return f"{keys.root}/{self._path}"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job under `root`, which is PREFIX/JOB."""

    root: str

    spec = _Below("spec")
    ledger = _Below("ledger")
    round = _Below("round")
    outcome = _Below("outcome")
    hang = _Below("hang")
    stragglers = _Below("stragglers")
    divergence = _Below("divergence")
    wanted = _Below("wanted")
    watched = _Below("watched")
    members = _Below("members/")
    world = _Below("world/")
    paces = _Below("paces/")
    step_times = _Below("step_times/")
    unfit = _Below("unfit/")

    def member(self, lease: int) -> str:
        return self.members + hexed(lease)

    def page(self, number: int) -> str:
        return f"{self.world}{number}"

    def pace(self, lease: int) -> str:
        return self.paces + hexed(lease)

    def step_time(self, lease: int) -> str:
        return self.step_times + hexed(lease)

    def unfit_node(self, node: str) -> str:
        return self.unfit + node

    def acks(self, generation: int | None = None) -> str:
        return self._folder("acks", generation)

    def ack(self, generation: int, lease: int) -> str:
        return self._folder("acks", generation) + hexed(lease)

    def reports(self, generation: int | None = None) -> str:
        return self._folder("reports", generation)

    def report(self, generation: int, lease: int) -> str:
        return self._folder("reports", generation) + hexed(lease)

    def steps(self, generation: int | None = None) -> str:
        return self._folder("steps", generation)

    def step(self, generation: int, lease: int) -> str:
        return self._folder("steps", generation) + hexed(lease)

    def history(self, generation: int | None = None) -> str:
        return f"{self.root}/history/" + ("" if generation is None else str(generation))

    def _folder(self, kind: str, generation: int | None) -> str:
        return f"{self.root}/{kind}/" + ("" if generation is None else f"{generation}/")


# --- values -------------------------------------------------------------------------------

if TYPE_CHECKING:
    Lease: TypeAlias = int
else:

    class Lease(int):
        """An int like any other, but hexadecimal in JSON."""


Number: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
Nodes: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST)]
ExitCode: TypeAlias = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=MOST_SECONDS)]
Factor: TypeAlias = Annotated[float, Meta(ge=0, lt=MOST_SECONDS)]
Every: TypeAlias = Annotated[str, Meta(pattern=r"\A(auto|off|[1-9][0-9]{0,8})\Z")]
# Names and reasons, of which logs consist: nobody forges another line of them.
Text: TypeAlias = Annotated[str, Meta(max_length=LONGEST, pattern=_LINE)]
Lines: TypeAlias = Annotated[str, Meta(max_length=LONGEST)]
Reason: TypeAlias = Annotated[str, Meta(min_length=1, max_length=LONGEST, pattern=_LINE)]
Workers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
# It becomes a variable of the workers' environment.
Address: TypeAlias = Annotated[str, Meta(pattern=_ADDRESS)]
Port: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 16)]
IP: TypeAlias = Annotated[str, Meta(pattern=_IP)]
Nonce: TypeAlias = Annotated[str, Meta(pattern=_NONCE)]


class Value(Struct, frozen=True):
    """The value of a key, or a part of it."""

    FROM_KEY: ClassVar[tuple[str, ...]] = ()  # fields that etcd says, and not the value
    DERIVED: ClassVar[tuple[str, ...]] = ()  # fields that are only written
    OPTIONAL: ClassVar[tuple[str, ...]] = ()  # fields that need not be there


class Lasting(Value, frozen=True, kw_only=True):
    """A value that several agents change one after the other."""

    later: tuple[tuple[str, str], ...] = ()  # a newer version's fields, with their JSON


class Phase(StrEnum):
    """How far a round has come."""

    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"


class Cause(StrEnum):
    """The end of a round or world, for which the next round was begun."""

    BEGIN = "begin"  # there was none before
    FAILURE = "failure"  # of a worker; or of what the job has in etcd
    LOST = "lost"  # a node
    LEAVE = "leave"
    JOIN = "join"
    SCALE = "scale"


class Sizes(Value, frozen=True):
    """How many nodes a world may have.

    A number from min to max, one of `sizes` if there are any, and a multiple of `multiple_of`.
    Both ends are such numbers.
    """

    min_nodes: Nodes
    max_nodes: Nodes
    sizes: Annotated[tuple[Nodes, ...], Meta(max_length=MOST_SIZES)] = ()
    multiple_of: Nodes = 1

    def __post_init__(self) -> None:
        """Raises ValueError for what no flags say."""
        if self.min_nodes > self.max_nodes:
            raise ValueError("min_nodes is above max_nodes")
        if self.min_nodes % self.multiple_of or self.max_nodes % self.multiple_of:
            raise ValueError("min_nodes or max_nodes is no multiple of multiple_of")
        if self.sizes and (self.min_nodes, self.max_nodes) != (self.sizes[0], self.sizes[-1]):
            raise ValueError("sizes are not from min_nodes to max_nodes")
        if any(a >= b for a, b in pairwise(self.sizes)):
            raise ValueError("sizes don't ascend")

    @property
    def nnodes(self) -> str:
        """The flags that say how many nodes may train."""
        if self.sizes:
            return ",".join(map(str, self.sizes))
        step = f" --nodes-multiple-of {self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.min_nodes}:{self.max_nodes}{step}"

    def largest(self, nodes: int) -> int:
        """The largest world that so many nodes make, 0 if they are too few."""
        if nodes < self.min_nodes:
            return 0
        most = min(nodes, self.max_nodes)
        if self.sizes:
            return max(size for size in self.sizes if size <= most)
        return most - most % self.multiple_of

    def larger(self, nodes: int) -> int:
        """The size of the smallest world of more nodes, 0 if there is none."""
        if nodes >= self.max_nodes:
            return 0
        if self.sizes:
            return min(size for size in self.sizes if size > nodes)
        return max(self.min_nodes, nodes + self.multiple_of - nodes % self.multiple_of)


class Limits(Sizes, frozen=True):
    """The policy of a job, as its user asked for it; times are in seconds."""

    max_restarts: Number = 3
    restart_window: Seconds = 3600.0
    min_uptime: Seconds = 10.0
    suspect_after: Number = 2  # rapid failures of a node, or times that it went; 0: never
    # Restarts in a row that come no further, see failure_policies.py; 0: never.
    stop_after_no_progress: Annotated[int, Meta(ge=0, le=MOST_STALLED)] = 3
    hang_action: Literal["report", "restart"] = "report"
    compare_every: Every = "auto"  # commits, from a comparison of the replicas to the next
    on_divergence: Literal["report", "restart", "drain"] = "report"
    copies: Nodes = 2  # of each piece of a sharded state, each on another node
    straggler_factor: Factor = 1.5  # 0: nobody is looked for
    settle: Seconds = 3.0
    join_settle: Seconds | None = None  # JOIN_SETTLE, 0 where all workers are elastic
    join_interval: Seconds = 0.0
    join_timeout: Seconds = 600.0
    cut_off: Seconds | None = None  # from a renewal until no worker is left; None: never
    leave_deadline: Seconds = GRACE_LEAVE  # of the workers of a node that leaves
    patience: Seconds = GRACE_LEAVE + UNKILLABLE + STOP_PATIENCE  # with survivors that don't ack

    @property
    def pages(self) -> int:
        """The number of a world's pages: the same for all, so that a node knows its page before."""
        return min(-(-self.max_nodes // ON_A_PAGE), MOST_PAGES)

    def with_sizes(self, of: Sizes) -> "Limits":
        """These limits with other numbers of nodes."""
        sizes = {name: getattr(of, name) for name in Sizes.__struct_fields__}
        return msgspec.structs.replace(self, **sizes)

    def seek_stragglers(self, nodes: int) -> bool:
        """Whether the nodes of a world of so many are compared."""
        return self.straggler_factor > 0 and nodes > 1

    def differing(self, own: "Limits") -> str:
        """The flags whose values here a node has asked for otherwise, "" if there is none."""
        both = ((flag, getattr(self, n), getattr(own, n)) for n, flag in _POLICY.items())
        told = [
            f"{flag} {_in_words(its)} (here {_in_words(here)})"
            for flag, its, here in both
            if its != here
        ]
        if (self.cut_off is None) != (own.cut_off is None):
            told.append("--when-cut-off")
        return ", ".join(told)


def _in_words(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "by default" if value is None else f"{value:.15g}"


_POLICY = {  # the limits that need not be the same on all nodes, by the flags that say them
    **{
        name: "--" + name.replace("_", "-")
        for name in Limits.__struct_fields__
        if name not in ("min_nodes", "max_nodes", "sizes", "multiple_of", "patience", "cut_off")
    },
    "patience": "the wait for a node that stops (--shutdown-timeout, --kill-timeout)",
}


class Spec(Lasting, frozen=True):
    """The first key of a run: its id and its limits."""

    run: Text  # tells two runs of one job id apart
    limits: Limits
    created_by: Text = ""
    min_version: Number = VERSION  # of the format, which an agent has to know to take part
    command: Text = ""  # a digest of what its workers run; "": unknown


class Labels(Value, frozen=True):
    """The place of a node, as it says itself, and the role of its workers."""

    topology: Text | UnsetType = UNSET
    role: Text | UnsetType = UNSET


class Contact(Value, frozen=True):
    """The address at which an agent takes calls of others, see agent/peer_links.py."""

    addr: IP
    port: Port
    nonce: Nonce


class Member(Value, frozen=True):
    """An agent that holds a live lease in the job; the lease id is its identity."""

    FROM_KEY: ClassVar = ("lease",)
    OPTIONAL: ClassVar = ("labels", "joined", "version", "leaving", "contact")

    lease: int
    node: Text
    nproc: Workers
    address: Text = ""
    labels: Labels | None = Labels()
    run: Text = ""
    joined: Number = 0
    version: Text = ""
    leaving: bool = False
    contact: Contact | None = None

    @property
    def topology(self) -> str:
        """The label of its place, "" without one."""
        return (self.labels and self.labels.topology) or ""

    @property
    def role(self) -> str:
        """The role of its workers, "" for the default one."""
        return (self.labels and self.labels.role) or ""


class Participant(Value, frozen=True):
    """A member in a world: its group rank, and the rank of its first worker."""

    lease: Lease
    node: Text
    nproc: Workers
    group_rank: Number
    first_rank: Number
    role_rank: Number | UnsetType = UNSET  # of its first worker, where a world has several roles
    role_size: Number | UnsetType = UNSET  # workers of this role


class Page(Value, frozen=True):
    """A part of the last world: a world of many nodes is too long for one value.

    The participant with lease L is on page L modulo the number of pages, so that each agent
    reads one page, whatever the size of the world.
    """

    generation: Number
    participants: tuple[Participant, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for what can't be a page."""
        if len({p.lease for p in self.participants}) < len(self.participants):
            raise ValueError("participants has one of them twice")


class Master(Value, frozen=True):
    """The store of a world: its MASTER_ADDR and MASTER_PORT."""

    addr: Address
    port: Port


class TrainingPlace(Value, frozen=True):
    """How far a worker had come in the whole training, over all worlds.

    So many steps after a commit of its state; or the step that the script itself has told.
    """

    step: Number
    commit: Number | UnsetType = UNSET
    epoch: Number | UnsetType = UNSET
    batch: Number | UnsetType = UNSET  # of the epoch, the first is 0
    indices: Annotated[tuple[Number, ...], Meta(max_length=MOST_INDICES)] = ()  # that rank's


class FailureKind(StrEnum):
    """The kinds of failures that later worlds are decided by."""

    ERROR = "error"  # a worker ended badly
    PEERS = "peers"  # it said that its peers were gone, and nobody knew why
    HANG = "hang"  # it was given up, or others had left it
    GONE = "gone"  # a node was lost or has left


class PastFailure(Value, frozen=True):
    """A line of the log of failures: the end of a world, in short."""

    node: Text  # "": nobody in particular
    kind: FailureKind
    at: Seconds  # that worlds of the run had trained by then
    rank: Number = 0
    code: ExitCode = 0
    what: Text = ""  # the error
    frame: Text = ""  # where it was raised, of one before the first step
    rapid: bool = False  # within --min-uptime of the worker's start
    early: bool = False  # the run had trained no step by then
    free: bool = False  # its node was left out, so that it used no restart
    place: TrainingPlace | UnsetType = UNSET  # in the training, of one that tells it


class Past(Lasting, frozen=True, kw_only=True):
    """The failures of a run until now: see failure_policies.py."""

    restarts: Number = 0  # that are used of the budget
    trained: Seconds = 0.0  # by all worlds of the run together: the clock of the failures
    failures: Annotated[tuple[PastFailure, ...], Meta(max_length=MOST_PAST)] = ()  # oldest first


class Round(Past, frozen=True):
    """An agreement on a set of members, who stand in the pages of the world.

    From its freeze on it has the past that becomes the ledger's.
    """

    generation: Number
    phase: Phase
    coordinator: Lease
    reason: Reason
    run: Text
    node: Text = ""  # of the coordinator
    nodes: Number = 0  # of the world, once it is final, as the next two
    world_size: Number = 0
    master: Master | None = None
    cause: Cause = Cause.FAILURE
    joins: bool = False  # for newcomers, and nothing is wrong: a step may take as long as it takes

    def __post_init__(self) -> None:
        """Raises ValueError for what can't be a round."""
        if self.phase is Phase.FINAL and not 0 < self.nodes <= self.world_size:
            counts = f"nodes {self.nodes}, and world_size {self.world_size}"
            raise ValueError(f"phase is final, {counts}")
        if self.phase is Phase.FINAL and self.master is None:
            raise ValueError("phase is final, and master null")

    @property
    def planned(self) -> bool:
        """Whether it is for a leave, a join or a new scale: workers get more time to stop."""
        return self.cause in (Cause.LEAVE, Cause.JOIN, Cause.SCALE)


class Ledger(Past, frozen=True):
    """The facts that outlive a round: bound to no lease, they change with the generation."""

    generation: Number = 0  # the last one handed out
    final: Number = 0  # the last one that had a world
    nodes: Number = 0  # of that world


class Ready(Value, frozen=True):
    """A member is ready for a generation: none of its older workers is alive."""

    FROM_KEY: ClassVar = ("lease",)
    OPTIONAL: ClassVar = ("left",)

    lease: int
    master: Master | None = None  # where it will serve the store, should it become group rank 0
    left: Text | UnsetType = UNSET  # a worker that had left its world's others, and how


class Failure(Value, frozen=True):
    """A worker that ended badly.

    If nobody in particular hung, or peers had left it, `node` is empty, and all numbers are 0. They
    are 0, too, if a world's store died, which is a failure of its node.
    """

    node: Text
    rank: Number
    local_rank: Number
    pid: Number
    code: ExitCode  # negative for a signal, 0 for a hang
    uptime: Seconds
    message: Lines = ""
    at: Text = ""
    hang: Text | UnsetType = UNSET  # says that it was given up, or that others had left it
    step: Number | UnsetType = (
        UNSET  # in which it was; of none that had not ended one, or tells none
    )
    place: TrainingPlace | UnsetType = UNSET  # in the training, of one that tells it

    def __str__(self) -> str:
        if self.hang:
            return self.hang
        return f"rank {self.rank} on {self.node} {words.ended(self.code)}"

    @property
    def last_words(self) -> str:
        """The line by which a worker's own message names its cause, "" where it has left none.

        A hang has its stack there, which names none: the failure itself says where it is.
        """
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        if self.hang or not lines:
            return ""
        # The agent's word stands before what the worker said itself.
        return lines[0] if lines[0].startswith("out of memory: ") else lines[-1]


class Report(Value, frozen=True):
    """The end of a node's workers."""

    FROM_KEY: ClassVar = ("lease", "revision")
    DERIVED: ClassVar = ("done",)

    lease: int
    revision: int  # of the write
    failure: Failure | None  # None when all of them exited 0
    victim: bool = False  # it failed after the next generation had begun, by its peers' end

    @property
    def done(self) -> bool:
        """Whether all workers exited 0."""
        return self.failure is None


class RankDoing(StrEnum):
    """The things that a worker does, by name: those of activity.py, and some more."""

    STARTING = "starting"
    INIT = "init"
    STEP = "step"
    CHECK = "check"
    COMMIT = "commit"
    SAVE = "save"
    QUIET = "quiet"
    DONE = "done"
    WAIT = "wait"  # in a step, and in a collective
    TRACED = "traced"  # by a debugger
    # Stages of a start that --start-timeout watches.
    BEFORE = "before"  # its process group
    GROUP = "group"  # making its process group, synchronising its state
    FIRST = "first"  # before the end of its first step


class RankStep(Value, frozen=True):
    """The place of a rank in its training."""

    rank: Number
    step: Number
    doing: RankDoing
    seconds: Seconds  # for which it has been in that step
    what: Text = ""  # it said that is quiet, or where its stack ends
    told: bool = False  # its steps are the script's, and not those of its optimizers
    file: Text | UnsetType = UNSET  # on its node, with its stacks


class NodeSteps(Value, frozen=True):
    """The places of a node's workers, of those that run."""

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    number: Number  # of the question that it answers, or wants to be asked
    ranks: Annotated[tuple[RankStep, ...], Meta(max_length=MOST_WORKERS)] = ()


class Hang(Value, frozen=True):
    """The coordinator's question to all nodes where their workers are, and then its answer."""

    generation: Number
    number: Number
    seconds: Seconds  # for which some worker has been in a step
    evidence: bool = False  # it is also asked where those that do not move stand
    line: Text = ""  # the answer
    alarm: bool = False  # the answer is that they hang
    rank: Number | None = None  # of the worker that is behind or has ended, if that is known
    at: Text = ""  # when that was found
    start: bool = False  # they have not come to their first step in --start-timeout


class Drain(Value, frozen=True):
    """A node that is to go, and not to come back before somebody undrains it."""

    node: Text
    deadline: Seconds | None = None  # of its workers' end; None: the run's leave_deadline
    lease: Text = ""  # only this member goes (see `hexed`), and the next of that name is welcome
    by: Text = ""
    at: Text = ""


class Halt(Value, frozen=True):
    """The wish that all nodes of a run go."""

    run: Text
    save: bool = False  # their scripts are waited for as they leave
    by: Text = ""
    at: Text = ""


class Scale(Sizes, frozen=True, kw_only=True):
    """The wish that other numbers of nodes train in a run from now on."""

    run: Text
    instead_of: Text  # the numbers in its spec
    by: Text = ""
    at: Text = ""


class Requests(Lasting, frozen=True):
    """The wishes that people have of a job. They write them, and agents only read them.

    Drains outlive a run: a node is kept out until somebody undrains it. The rest is of one run.
    """

    OPTIONAL: ClassVar = ("drains", "stop", "scale")

    drains: Annotated[tuple[Drain, ...], Meta(max_length=MOST_DRAINS)] = ()
    stop: Halt | None = None
    scale: Scale | None = None


class Watched(Value, frozen=True):
    """Says that somebody looks at the job, while their lease lives: nodes then say their pace."""

    seconds: Annotated[float, Meta(ge=0.5, le=60.0)] = 2.0  # from one pace of a node to the next
    by: Text = ""


class Pace(Value, frozen=True):
    """The step and the speed of a node's slowest worker in its world."""

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    generation: Number
    step: Number
    per_second: Seconds
    doing: RankDoing


class StepTime(Value, frozen=True):
    """The usual time of a step of that worker of a node which spends the most outside."""

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    generation: Number
    outside: Seconds  # of collectives
    whole: Seconds


class Stragglers(Value, frozen=True):
    """The nodes that have been told to be slow, by name, and the last line about one of them."""

    generation: Number = 0
    number: Number = 0
    line: Text = ""
    nodes: Annotated[tuple[Text, ...], Meta(max_length=MOST_STRAGGLERS)] = ()


class Divergence(Value, frozen=True):
    """The lines of a world about workers that have other values than the other replicas."""

    generation: Number
    lines: Annotated[tuple[Text, ...], Meta(max_length=MOST_DIVERGENCES)] = ()


class Unfit(Value, frozen=True):
    """A node that --health-check has kept out, or made leave, some minutes ago."""

    node: Text
    why: Text
    at: Text = ""


class Outcome(Value, frozen=True):
    """The end of a run of the job."""

    state: Text  # succeeded, failed or stopped
    reason: Text
    run: Text
    generation: Number
    exit_code: Number
    failure: Failure | None = None
    at: Text = ""
    command: Text = ""  # the spec's


class Spent(Value, frozen=True):
    """The time of worlds by its use, as the node that coordinated at their end has measured it."""

    worlds: Number = 1
    planned: Number = 0  # of these, begun because a node joined or left
    steps: Number = 0
    commits: Number = 0
    rendezvous: Seconds = 0.0  # from the end of the world before
    start: Seconds = 0.0  # then, of the workers
    first_step: Seconds = 0.0  # until its end
    trained: Seconds = 0.0  # until the end of the last step
    again: Seconds = 0.0  # of that, lost: since the last commit
    detect: Seconds = 0.0  # until the world was known to be over
    hang: Seconds = 0.0  # the same, of a world that hung
    stop: Seconds = 0.0  # then, of the workers
    unknown: Seconds = 0.0  # of worlds in which that node did not train, or saw no step
    pause: Seconds = 0.0  # the longest from a step of one world to the first of the next

    def plus(self, other: "Spent") -> "Spent":
        """Both together, within bounds: others may have written numbers of any size."""
        names = self.__struct_fields__
        both = ((name, getattr(self, name), getattr(other, name)) for name in names)
        fields: dict[str, Any] = {name: _within(own + its) for name, own, its in both}
        return Spent(**fields | {"pause": _within(max(self.pause, other.pause))})


def _within(value: float) -> float:
    """A sum that can be written again, in milliseconds where it is of seconds."""
    if isinstance(value, int):
        return min(value, LARGEST)
    return min(round(value, 3), MOST_SECONDS / 2)


class History(Lasting, frozen=True):
    """The story of a world for people to read: why it began and ended, and who was in it."""

    OPTIONAL: ClassVar = (
        *("run", "began", "began_at", "coordinator", "nodes", "world_size", "restarts"),
        *("ended", "ended_at", "failures", "hangs", "hung_at", "stragglers", "divergences"),
        *("outcome", "spent", "spent_before"),
    )

    generation: Number
    run: Text | UnsetType = UNSET
    began: Text | UnsetType = UNSET
    began_at: Text | UnsetType = UNSET
    coordinator: Text | UnsetType = UNSET
    nodes: tuple[Text, ...] | UnsetType = UNSET
    world_size: Number | UnsetType = UNSET
    restarts: Number | UnsetType = UNSET
    ended: Text | UnsetType = UNSET
    ended_at: Text | UnsetType = UNSET
    failures: tuple[Failure, ...] | UnsetType = UNSET
    hangs: tuple[Text, ...] | UnsetType = UNSET
    hung_at: tuple[Text, ...] | UnsetType = UNSET  # the time of each of these
    stragglers: tuple[Text, ...] | UnsetType = UNSET
    divergences: tuple[Text, ...] | UnsetType = UNSET
    outcome: Outcome | UnsetType = UNSET
    spent: Spent | UnsetType = UNSET  # once it has ended
    spent_before: Spent | UnsetType = UNSET  # by all older worlds of its run, also forgotten ones

    @property
    def spent_until_now(self) -> Spent | None:
        """The time of the run up to the end of this world; None before the end of its first."""
        known = [s for s in (self.spent_before, self.spent) if isinstance(s, Spent)]
        return known[0].plus(known[1]) if len(known) > 1 else known[0] if known else None


# --- their JSON ---------------------------------------------------------------------------


def seconds_of(at: object) -> float | None:
    """A time of somebody else's, in ISO 8601, as seconds since 1970; None for what is no time."""
    try:
        return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else None
    except (ValueError, OverflowError):
        return None


def encode(value: Value) -> str:
    """The text of a value: one JSON object, keys sorted; UTF-8, whatever a worker said."""
    kept = {n: json.loads(told) for n, told in value.later} if isinstance(value, Lasting) else {}
    fields = {**kept, "v": VERSION, **plain(value)}
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="replace").decode()


def decode(kind: type[V], text: str, **from_key: int) -> V:
    """The value in `text`, with what etcd says of its key.

    Raises ValueError that names the field when it is none that this version understands.
    """
    try:
        fields = _fields(text)
        if missing := _required(kind) - fields.keys():
            raise ValueError(f"{min(missing)} is missing")
        if issubclass(kind, Lasting):
            fields["later"] = _later(kind, fields)
        return msgspec.convert(fields | from_key, kind, dec_hook=_lease_of)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    except msgspec.MsgspecError as error:  # in its older versions no ValueError
        raise ValueError(str(error)) from None


def format_of(text: str) -> int:
    """The format version that `text` says one has to know, to read it or to take part; 0: none."""
    try:
        told = msgspec.json.decode(text, type=_Versioned)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0
    versions = (v for v in (told.v, told.min_version) if type(v) is int)
    return max((v for v in versions if 0 <= v <= LARGEST), default=0)


def names_a_run(text: str) -> bool:
    """True if `text` is a spec, as far as any version's has a run and limits."""
    try:
        msgspec.json.decode(text, type=_Begun)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return True


class _Begun(Struct):
    run: str
    limits: dict[str, Any]


class _Versioned(Struct):
    v: Any = 0
    min_version: Any = 0


def plain(value: Value) -> dict[str, Any]:
    """The fields of a value that are written, as JSON has them."""
    found = ((name, form(getattr(value, name))) for name, form in _written(type(value)))
    return {name: field for name, field in found if field is not UNSET}


def _fields(text: str) -> dict[str, Any]:
    fields = msgspec.json.decode(text)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    if fields.get("v") not in _READ:
        version = str(fields.get("v"))[:40]
        raise ValueError(f"format version {version}, this program knows {VERSION}")
    if fields["v"] == 1 and "rapid_failures" in fields:  # a round or a ledger
        fields = {k: v for k, v in fields.items() if k not in _COUNTERS} | {"failures": []}
    return fields


# Of version 1, in place of a log; commands show how many restarts such a run has used.
_COUNTERS = frozenset(("rapid_failures", "suspects", "early", "stalled"))


def _later(kind: type[Value], fields: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The fields that this version does not know; none where they are too long for a Txn."""
    names = sorted(fields.keys() - {*kind.__struct_fields__, "v"})
    found = tuple((name, json.dumps(fields[name], sort_keys=True)) for name in names)
    return found if sum(len(name) + len(text) for name, text in found) <= LONGEST else ()


def _lease_of(kind: type, text: Any) -> Any:
    del kind  # there is one type only that msgspec does not know
    return Lease(unhexed(text))


@cache
def _required(kind: type[Value]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) - {*kind.FROM_KEY, *kind.OPTIONAL, "later"}


@cache
def _written(kind: type[Value]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The names of the fields that are written, and what makes JSON of each."""
    forms: dict[Any, Callable[[Any], Any]] = {Lease: hexed, Lines: itemgetter(slice(LONGEST))}
    fields = msgspec.structs.fields(kind)
    unwritten = (*kind.FROM_KEY, "later")
    own = [(f.name, forms.get(f.type, _plain)) for f in fields if f.name not in unwritten]
    return (*own, *((name, _plain) for name in kind.DERIVED))


def _plain(field: Any) -> Any:
    """A text that grew too long is cut, and a line is one: what is written can be read."""
    if isinstance(field, str):
        return field[:LONGEST].replace("\n", " ")
    if isinstance(field, Value):
        return plain(field)
    return [_plain(item) for item in field] if isinstance(field, tuple) else field
