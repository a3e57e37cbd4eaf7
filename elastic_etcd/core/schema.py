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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

VERSION = 1
PREFIX = "/elastic_etcd"
# A job or a part of a prefix that is called so could lie among another job's keys.
PARTS = frozenset(("spec", "members", "ledger", "round", "acks", "reports", "history", "outcome"))
LARGEST = (1 << 63) - 1  # etcd's own numbers have 63 bits
LONGEST = 1 << 16  # characters of a text
MOST_WORKERS = 4096  # of one node

_ADDRESS = r"\A[A-Za-z0-9.:%_-]{1,255}\Z"
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

    def _folder(self, kind: str, generation: int | None) -> str:
        return f"{self.root}/{kind}/" + ("" if generation is None else f"{generation}/")


# --- values -------------------------------------------------------------------------------

if TYPE_CHECKING:
    Lease: TypeAlias = int
else:

    class Lease(int):
        """An int like any other, but hexadecimal in JSON."""


Number: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST)]
ExitCode: TypeAlias = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, lt=1e12)]
Text: TypeAlias = Annotated[str, Meta(max_length=LONGEST)]
Reason: TypeAlias = Annotated[str, Meta(min_length=1, max_length=LONGEST)]
Workers: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
# It becomes a variable of the workers' environment.
Address: TypeAlias = Annotated[str, Meta(pattern=_ADDRESS)]
Port: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 16)]


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


class Spec(Value, frozen=True):
    """What a job was created with; `run` tells two runs of one job id apart."""

    run: Text
    min_nodes: Number
    max_nodes: Number
    created_by: Text = ""


class Labels(Value, frozen=True):
    """What a node says of where it is."""

    topology: Text | UnsetType = UNSET


class Member(Value, frozen=True):
    """An agent that holds a live lease in the job; the lease id is its identity."""

    FROM_KEY: ClassVar = ("lease",)
    OPTIONAL: ClassVar = ("labels", "joined", "version", "leaving")

    lease: int
    node: Text
    nproc: Workers
    address: Text = ""
    labels: Labels | None = Labels()
    run: Text = ""
    joined: Number = 0
    version: Text = ""
    leaving: bool = False

    @property
    def topology(self) -> str:
        """Its label, "" without one."""
        return (self.labels and self.labels.topology) or ""


class Participant(Value, frozen=True):
    """A member in a round's world; its index there is its group rank."""

    lease: Lease
    node: Text
    nproc: Workers


class Master(Value, frozen=True):
    """Where the store of a world is: its MASTER_ADDR and MASTER_PORT."""

    addr: Address
    port: Port


class Round(Value, frozen=True):
    """One agreement on a set of members."""

    generation: Number
    phase: Phase
    coordinator: Lease
    reason: Reason
    run: Text
    participants: tuple[Participant, ...] = ()
    master: Master | None = None
    restarts: Number = 0
    rapid_failures: Number = 0
    trained: Seconds = 0.0
    planned: bool = False  # begun by a join or a leave: workers get more time to stop

    def __post_init__(self) -> None:
        """Raises ValueError for what can't be a round."""
        if len({p.lease for p in self.participants}) < len(self.participants):
            raise ValueError("participants has one of them twice")
        if self.phase in (Phase.FROZEN, Phase.FINAL) and not self.participants:
            raise ValueError(f"phase is {self.phase}, and participants empty")
        if self.phase is Phase.FINAL and self.master is None:
            raise ValueError("phase is final, and master null")

    def group_rank(self, lease: int) -> int | None:
        """The group rank of the member with `lease`, None when it is no participant."""
        return next((i for i, p in enumerate(self.participants) if p.lease == lease), None)


class Ledger(Value, frozen=True):
    """What outlives a round: it is bound to no lease and changes with the generation.

    `generation` is the last one handed out, `final` the last one that had a world. `group_ranks`
    are the leases of that world in rank order, `nodes` their names. `restarts` is how much of the
    budget is used, `rapid_failures` how many times in a row a worker failed right after its start,
    `trained` how many seconds the worlds since the last failure have lasted together.
    """

    generation: Number = 0
    final: Number = 0
    group_ranks: tuple[Lease, ...] = ()
    nodes: tuple[Text, ...] = ()
    restarts: Number = 0
    rapid_failures: Number = 0
    trained: Seconds = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for what can't be a ledger."""
        if len(self.group_ranks) != len(self.nodes):
            counts = f"{len(self.group_ranks)} leases, nodes {len(self.nodes)} names"
            raise ValueError(f"group_ranks has {counts}")
        if len(set(self.group_ranks)) < len(self.group_ranks):
            raise ValueError("group_ranks has a lease twice")


class Ack(Value, frozen=True):
    """A member is ready for a generation: none of its older workers is alive.

    `master` is where it will serve the store, should it become group rank 0.
    """

    FROM_KEY: ClassVar = ("lease",)

    lease: int
    master: Master | None = None


class Failure(Value, frozen=True):
    """A worker that ended badly. `code` is negative for a signal; `uptime` is in seconds."""

    node: Text
    rank: Number
    local_rank: Number
    pid: Number
    code: ExitCode
    uptime: Seconds
    message: Text = ""
    at: Text = ""

    def __str__(self) -> str:
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


class Outcome(Value, frozen=True):
    """How a run of the job ended: `state` is succeeded, failed or stopped."""

    state: Text
    reason: Text
    run: Text
    generation: Number
    exit_code: Number
    failure: Failure | None = None
    at: Text = ""


class History(Value, frozen=True):
    """Why a world began and ended, and who was in it, for people to read."""

    OPTIONAL: ClassVar = (
        *("run", "began", "began_at", "coordinator", "nodes", "world_size", "restarts"),
        *("ended", "ended_at", "failures", "outcome"),
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
    outcome: Outcome | UnsetType = UNSET


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
    """The format version that `text` says it is written in; 0 where it says none."""
    try:
        return msgspec.json.decode(text, type=_Versioned).v
    except (ValueError, RecursionError):
        return 0


class _Versioned(Struct):
    v: int = 0


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
    forms: dict[Any, Callable[[Any], Any]] = {Lease: hexed, tuple[Lease, ...]: _all_hexed}
    fields = msgspec.structs.fields(kind)
    own = [(f.name, forms.get(f.type, _plain)) for f in fields if f.name not in kind.FROM_KEY]
    return (*own, *((name, _plain) for name in kind.DERIVED))


def _all_hexed(leases: tuple[int, ...]) -> list[str]:
    return [hexed(lease) for lease in leases]


def _plain(field: Any) -> Any:
    """A text that grew too long is cut: what is written can be read."""
    if isinstance(field, str):
        return field[:LONGEST]
    if isinstance(field, Value):
        return plain(field)
    return [_plain(item) for item in field] if isinstance(field, tuple) else field
