"""A job's keys in etcd: their names, and what each of them holds.

Every value is a JSON object with "v": 1 and sorted keys, so that
`etcdctl get --prefix /elastic_etcd/JOB` reads well. Anybody with the right to write may have
written it: `decode` ignores fields that it does not know and refuses what is not as described
here, by the field's path. docs/keys.md shows each value with an example; times in them are for
people to read only.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from elastic_etcd.times import GRACE_LEAVE, STOP_PATIENCE, UNKILLABLE

VERSION = 1
PREFIX = "/elastic_etcd"
# A job or a part of a prefix that is called so could lie among another job's keys.
PARTS = frozenset(
    (
        *("spec", "members", "ledger", "round", "world", "acks", "reports", "history", "outcome"),
        *("hang", "steps", "wanted", "watched", "paces"),
        *("step_times", "stragglers"),
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
MOST_SECONDS = 1e12

_ADDRESS = r"\A[A-Za-z0-9.:%_-]{1,255}\Z"
_IP = r"\A[0-9A-Fa-f.:]{2,45}\Z"
_NONCE = r"\A[0-9a-f]{32}\Z"
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


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job under `root`, which is PREFIX/JOB."""

    root: str

    @property
    def spec(self) -> str:
        return f"{self.root}/spec"

    @property
    def members(self) -> str:
        return f"{self.root}/members/"

    def member(self, lease: int) -> str:
        return f"{self.root}/members/{hexed(lease)}"

    @property
    def ledger(self) -> str:
        return f"{self.root}/ledger"

    @property
    def round(self) -> str:
        return f"{self.root}/round"

    @property
    def world(self) -> str:
        return f"{self.root}/world/"

    def page(self, number: int) -> str:
        return f"{self.root}/world/{number}"

    def acks(self, generation: int | None = None) -> str:
        return self._folder("acks", generation)

    def ack(self, generation: int, lease: int) -> str:
        return self._folder("acks", generation) + hexed(lease)

    def reports(self, generation: int | None = None) -> str:
        return self._folder("reports", generation)

    def report(self, generation: int, lease: int) -> str:
        return self._folder("reports", generation) + hexed(lease)

    def history(self, generation: int | None = None) -> str:
        return f"{self.root}/history/" + ("" if generation is None else str(generation))

    @property
    def outcome(self) -> str:
        return f"{self.root}/outcome"

    @property
    def hang(self) -> str:
        return f"{self.root}/hang"

    @property
    def wanted(self) -> str:
        return f"{self.root}/wanted"

    @property
    def watched(self) -> str:
        return f"{self.root}/watched"

    @property
    def paces(self) -> str:
        return f"{self.root}/paces/"

    def pace(self, lease: int) -> str:
        return f"{self.root}/paces/{hexed(lease)}"

    @property
    def step_times(self) -> str:
        return f"{self.root}/step_times/"

    def step_time(self, lease: int) -> str:
        return f"{self.root}/step_times/{hexed(lease)}"

    @property
    def stragglers(self) -> str:
        return f"{self.root}/stragglers"

    def steps(self, generation: int | None = None) -> str:
        return self._folder("steps", generation)

    def step(self, generation: int, lease: int) -> str:
        return self._folder("steps", generation) + hexed(lease)

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
Text: TypeAlias = Annotated[str, Meta(max_length=LONGEST)]
Reason: TypeAlias = Annotated[str, Meta(min_length=1, max_length=LONGEST)]
Workers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
# It becomes a variable of the workers' environment.
Address: TypeAlias = Annotated[str, Meta(pattern=_ADDRESS)]
Port: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 16)]
IP: TypeAlias = Annotated[str, Meta(pattern=_IP)]
Nonce: TypeAlias = Annotated[str, Meta(pattern=_NONCE)]


class Value(Struct, frozen=True):
    """What a key holds, or a part of it.

    FROM_KEY names the fields that are not in the value: etcd says them. DERIVED are those that
    are only written, OPTIONAL those that need not be there.
    """

    FROM_KEY: ClassVar[tuple[str, ...]] = ()
    DERIVED: ClassVar[tuple[str, ...]] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ()


class Phase(StrEnum):
    """How far a round has come."""

    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"


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
    """What the user asked for; times are in seconds."""

    max_restarts: Number = 3
    restart_window: Seconds = 3600.0
    min_uptime: Seconds = 10.0
    suspect_after: Number = 2  # rapid failures of a node, or times that it went; 0: never
    hang_action: Literal["report", "restart"] = "report"
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
        """On how many pages worlds are: the same for all, so that a node knows its page before."""
        return min(-(-self.max_nodes // ON_A_PAGE), MOST_PAGES)

    def with_sizes(self, of: Sizes) -> "Limits":
        """These limits with other numbers of nodes."""
        sizes = {name: getattr(of, name) for name in Sizes.__struct_fields__}
        return msgspec.structs.replace(self, **sizes)

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


class Spec(Value, frozen=True):
    """What a job was created with; `run` tells two runs of one job id apart.

    An agent that knows no format version of at least `min_version` may not take part.
    """

    run: Text
    limits: Limits
    created_by: Text = ""
    min_version: Number = VERSION


class Labels(Value, frozen=True):
    """What a node says of where it is."""

    topology: Text | UnsetType = UNSET


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
        """Its label, "" without one."""
        return (self.labels and self.labels.topology) or ""


class Participant(Value, frozen=True):
    """A member in a world: its group rank, and the rank of its first worker."""

    lease: Lease
    node: Text
    nproc: Workers
    group_rank: Number
    first_rank: Number


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
    """Where the store of a world is: its MASTER_ADDR and MASTER_PORT."""

    addr: Address
    port: Port


class Suspect(Value, frozen=True):
    """A node that failed or went again and again, by name: see core/suspects.py.

    `failed` is how many times in a row a worker of it failed right after its start, `went` how
    many times it was lost or left, `since` how many seconds worlds have trained since the last
    of these.
    """

    node: Text
    failed: Number = 0
    went: Number = 0
    since: Seconds = 0.0


class Round(Value, frozen=True):
    """One agreement on a set of members. Which they are stands in the pages of the world.

    `node` is the coordinator's name, `nodes` and `world_size` count the world once it is final.
    """

    generation: Number
    phase: Phase
    coordinator: Lease
    reason: Reason
    run: Text
    node: Text = ""
    nodes: Number = 0
    world_size: Number = 0
    master: Master | None = None
    restarts: Number = 0
    rapid_failures: Number = 0
    trained: Seconds = 0.0
    suspects: tuple[Suspect, ...] = ()
    planned: bool = False  # begun by a join or a leave: workers get more time to stop
    joins: bool = False  # for newcomers, and nothing is wrong: a step may take as long as it takes

    def __post_init__(self) -> None:
        """Raises ValueError for what can't be a round."""
        if self.phase is Phase.FINAL and not 0 < self.nodes <= self.world_size:
            counts = f"nodes {self.nodes}, and world_size {self.world_size}"
            raise ValueError(f"phase is final, {counts}")
        if self.phase is Phase.FINAL and self.master is None:
            raise ValueError("phase is final, and master null")


class Ledger(Value, frozen=True):
    """What outlives a round: it is bound to no lease and changes with the generation.

    `generation` is the last one handed out, `final` the last one that had a world, which has
    `nodes` nodes. `restarts` is how much of the budget is used, `rapid_failures` how many times in
    a row a worker failed right after its start, `trained` how many seconds the worlds since the
    last failure have lasted together, `suspects` the nodes that are left out, or soon will be.
    """

    generation: Number = 0
    final: Number = 0
    nodes: Number = 0
    restarts: Number = 0
    rapid_failures: Number = 0
    trained: Seconds = 0.0
    suspects: tuple[Suspect, ...] = ()


class Ack(Value, frozen=True):
    """A member is ready for a generation: none of its older workers is alive.

    `master` is where it will serve the store, should it become group rank 0.
    """

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    master: Master | None = None


class Failure(Value, frozen=True):
    """A worker that ended badly. `code` is negative for a signal; `uptime` is in seconds.

    One that hung was given up, also by a timer of its own: `hang` says so, and `code` is 0. Where
    nobody in particular hung `node` is empty, and all numbers are 0; so it is of a world whose
    store has died.
    """

    node: Text
    rank: Number
    local_rank: Number
    pid: Number
    code: ExitCode
    uptime: Seconds
    message: Text = ""
    at: Text = ""
    hang: Text | UnsetType = UNSET

    def __str__(self) -> str:
        if self.hang:
            return self.hang
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"exited {self.code}"
        return f"worker {self.rank} on {self.node} {how}"


class Report(Value, frozen=True):
    """How a node's workers ended: `failure` is None when all of them exited 0.

    A `victim` failed after the next generation had begun: workers die of their peers' end.
    `revision` is etcd's, of the write.
    """

    FROM_KEY: ClassVar = ("lease", "revision")
    DERIVED: ClassVar = ("done",)

    lease: int
    revision: int
    failure: Failure | None
    victim: bool = False

    @property
    def done(self) -> bool:
        """Whether all workers exited 0."""
        return self.failure is None


class Doing(StrEnum):
    """What a worker does; the names of those of activity.py, and two more."""

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


class RankStep(Value, frozen=True):
    """Where one rank is: in `step` for so many seconds, of which it does `doing`.

    `what` it said that is quiet, or where its stack ends. Steps that a script has `told` are not
    those of its optimizers.
    """

    rank: Number
    step: Number
    doing: Doing
    seconds: Seconds
    what: Text = ""
    told: bool = False


class Steps(Value, frozen=True):
    """Where the workers of a node are, those that run.

    `number` is that of the question that it answers, or wants to be asked.
    """

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    number: Number
    ranks: Annotated[tuple[RankStep, ...], Meta(max_length=MOST_WORKERS)] = ()


class Hang(Value, frozen=True):
    """The coordinator's question to all nodes where their workers are, and with `line` its answer.

    Somebody has been found in a step for so many `seconds`. With `evidence` it is also asked where
    those that do not move stand. `alarm` is whether the line is of a hang; `rank` who is behind,
    where that is known.
    """

    generation: Number
    number: Number
    seconds: Seconds
    evidence: bool = False
    line: Text = ""
    alarm: bool = False
    rank: Number | None = None


class Drain(Value, frozen=True):
    """A node that is to go, and not to come back before somebody undrains it.

    Its workers have `deadline` seconds to end, None: the run's leave_deadline. With `lease`, as
    hexed gives it, only that member is to go, and who comes after it is welcome.
    """

    node: Text
    deadline: Seconds | None = None
    lease: Text = ""
    by: Text = ""
    at: Text = ""


class Halt(Value, frozen=True):
    """That all nodes of `run` are to go; with `save` their scripts are waited for as they leave."""

    run: Text
    save: bool = False
    by: Text = ""
    at: Text = ""


class Scale(Sizes, frozen=True, kw_only=True):
    """How many nodes are to train in `run` from now on, `instead_of` what its spec says."""

    run: Text
    instead_of: Text
    by: Text = ""
    at: Text = ""


class Wanted(Value, frozen=True):
    """What people want of a job. They write it, and agents only read it.

    Drains outlive a run: a node is kept out until somebody undrains it. The rest is of one run.
    """

    OPTIONAL: ClassVar = ("drains", "stop", "scale")

    drains: Annotated[tuple[Drain, ...], Meta(max_length=MOST_DRAINS)] = ()
    stop: Halt | None = None
    scale: Scale | None = None


class Watched(Value, frozen=True):
    """That somebody looks at the job, as long as their lease lives: nodes say how fast they are.

    Each does so every `seconds`, and more seldom where there are many.
    """

    seconds: Annotated[float, Meta(ge=0.5, le=60.0)] = 2.0
    by: Text = ""


class Pace(Value, frozen=True):
    """How far the slowest worker of a node is in its world, and how fast it was of late."""

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    generation: Number
    step: Number
    per_second: Seconds
    doing: Doing


class StepTime(Value, frozen=True):
    """How long a step of a node's workers usually takes, and of that `outside` of collectives.

    In seconds; of several workers it is the one that spends the most outside.
    """

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    generation: Number
    outside: Seconds
    whole: Seconds


class Stragglers(Value, frozen=True):
    """The nodes that have been told to be slow, by name, and the last line about one of them."""

    generation: Number = 0
    number: Number = 0
    line: Text = ""
    nodes: Annotated[tuple[Text, ...], Meta(max_length=MOST_STRAGGLERS)] = ()


class Outcome(Value, frozen=True):
    """How a run of the job ended: `state` is succeeded, failed or stopped."""

    state: Text
    reason: Text
    run: Text
    generation: Number
    exit_code: Number
    failure: Failure | None = None
    at: Text = ""


class Spent(Value, frozen=True):
    """Where the seconds of worlds went, as the node that coordinated at their end has measured it.

    Of each world first `rendezvous`, from the end of the one before, then `start` of its workers
    and their `first_step`; `trained` until the last step, of which `again` is what was lost with
    it, from the last commit on; `detect`, or `hang`, until it was known to be over, and `stop` of
    its workers. `unknown` are worlds in which that node did not train, or saw no step. `pause` is
    the longest from a step of one world to the first of the next.
    """

    worlds: Number = 1
    planned: Number = 0  # of these, begun because a node joined or left
    steps: Number = 0
    commits: Number = 0
    rendezvous: Seconds = 0.0
    start: Seconds = 0.0
    first_step: Seconds = 0.0
    trained: Seconds = 0.0
    again: Seconds = 0.0
    detect: Seconds = 0.0
    hang: Seconds = 0.0
    stop: Seconds = 0.0
    unknown: Seconds = 0.0
    pause: Seconds = 0.0

    def plus(self, other: "Spent") -> "Spent":
        """Both together. What others wrote may be as large as may be, and so may this."""
        names = self.__struct_fields__
        both = ((name, getattr(self, name), getattr(other, name)) for name in names)
        fields: dict[str, Any] = {name: _within(own + its) for name, own, its in both}
        return Spent(**fields | {"pause": _within(max(self.pause, other.pause))})


def _within(value: float) -> float:
    """A sum that can be written again, in milliseconds where it is of seconds."""
    if isinstance(value, int):
        return min(value, LARGEST)
    return min(round(value, 3), MOST_SECONDS / 2)


class History(Value, frozen=True):
    """Why a world began and ended, and who was in it, for people to read.

    `spent` is how its time went, once it has ended, `spent_before` that of all older worlds of
    its run, also those that nobody remembers.
    """

    OPTIONAL: ClassVar = (
        *("run", "began", "began_at", "coordinator", "nodes", "world_size", "restarts"),
        *("ended", "ended_at", "failures", "hangs", "stragglers", "outcome"),
        *("spent", "spent_before"),
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
    stragglers: tuple[Text, ...] | UnsetType = UNSET
    outcome: Outcome | UnsetType = UNSET
    spent: Spent | UnsetType = UNSET
    spent_before: Spent | UnsetType = UNSET

    @property
    def spent_until_now(self) -> Spent | None:
        """Of the run up to the end of this world; None for its first world, before that."""
        known = [s for s in (self.spent_before, self.spent) if isinstance(s, Spent)]
        return known[0].plus(known[1]) if len(known) > 1 else known[0] if known else None


# --- their JSON ---------------------------------------------------------------------------


def encode(value: Value) -> str:
    """What a key holds: one JSON object, keys sorted; UTF-8, whatever a worker said."""
    fields = {"v": VERSION, **plain(value)}
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
    except (ValueError, RecursionError):
        return 0
    versions = (v for v in (told.v, told.min_version) if type(v) is int)
    return max((v for v in versions if 0 <= v <= LARGEST), default=0)


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
    if fields.get("v") != VERSION:
        version = str(fields.get("v"))[:40]
        raise ValueError(f"format version {version}, this program knows {VERSION}")
    return fields


def _lease_of(kind: type, text: Any) -> Any:
    del kind  # there is one type only that msgspec does not know
    return Lease(unhexed(text))


@cache
def _required(kind: type[Value]) -> frozenset[str]:
    return frozenset(kind.__struct_fields__) - {*kind.FROM_KEY, *kind.OPTIONAL}


@cache
def _written(kind: type[Value]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """The names of the fields that are written, and what makes JSON of each."""
    forms: dict[Any, Callable[[Any], Any]] = {Lease: hexed}
    fields = msgspec.structs.fields(kind)
    own = [(f.name, forms.get(f.type, _plain)) for f in fields if f.name not in kind.FROM_KEY]
    return (*own, *((name, _plain) for name in kind.DERIVED))


def _plain(field: Any) -> Any:
    """A text that grew too long is cut: what is written can be read."""
    if isinstance(field, str):
        return field[:LONGEST]
    if isinstance(field, Value):
        return plain(field)
    return [_plain(item) for item in field] if isinstance(field, tuple) else field
