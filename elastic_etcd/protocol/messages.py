"""The messages between an agent and its workers, its fork server, and torch's agent beside it.

Each message is one packet of a SOCK_SEQPACKET socket: a JSON object of at most LONGEST bytes, whose
"type" says which message it is. docs/contributing/channel.md shows each. Both ends check what they
read: a field that is missing, of another type or out of its bounds is refused by its name, and a
field that is not known is ignored.
"""

from typing import Annotated, Any, Generic, TypeAlias, TypeVar, cast

from msgspec import Meta, MsgspecError, Struct, json
from msgspec.structs import replace

VERSION = 1
LONGEST = 1 << 16  # bytes of a packet
LONGEST_TEXT = 1 << 12  # characters of a reason or an error, each of which may take twelve bytes
UNCOUNTED = 1 << 31  # as --max-restarts beside torchrun, which counts restarts by itself
_TEXTS = ("reason", "error", "line")
M = TypeVar("M")

Number: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
LocalRank: TypeAlias = Annotated[int, Meta(ge=0, le=4095)]
Name: TypeAlias = Annotated[str, Meta(max_length=256)]


class _Message(Struct, frozen=True, tag_field="type", tag=str.lower):
    """A message; its tag is its name."""


# --- from a worker ------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The first message: a worker says which one it is."""

    v: int  # the version of these messages
    pid: Number
    local_rank: LocalRank
    generation: Number


class Elastic(_Message, frozen=True):
    """The worker recovers in process: it is told to park instead of being killed."""


class Parked(_Message, frozen=True):
    """The worker waits without a process group."""

    generation: Number
    error: str  # that made it wait, if nobody had asked it to


class TrainingDone(_Message, frozen=True, tag="finished"):
    """The worker has left its worlds, and does not read any more: SIGTERM reaches it from now on.

    It may have much to do still: an export, an upload, the last evaluation.
    """


class Keep(_Message, frozen=True):
    """Keep the descriptor that comes along; it replaces an older one of this name."""

    id: Number
    name: Name


class Drop(_Message, frozen=True):
    """Let go of what is kept under this name."""

    name: Name


class Recall(_Message, frozen=True):
    """Give back what is kept under this name."""

    id: Number
    name: Name


class Share(_Message, frozen=True):
    """Let the descriptor that comes along be all workers' of this node, or give the one that is."""

    id: Number
    name: Name


class AskCurrent(_Message, frozen=True, tag="current"):
    """The worker asks whether its generation is the job's current one."""

    id: Number


class AskLeaving(_Message, frozen=True, tag="leaving"):
    """The worker asks whether its node has been told to leave the job."""

    id: Number


class Diverged(_Message, frozen=True):
    """Ranks, which are replicas, have other values than the rest. Rank 0 says so, and each of them.

    named: the worker is one of them. alone: most of the ranks agree, so that it is wrong.
    """

    generation: Number
    line: str
    named: bool
    alone: bool


Request: TypeAlias = Keep | Recall | Share | AskCurrent | AskLeaving  # that has an answer
FromWorker: TypeAlias = Hello | Elastic | Parked | TrainingDone | Drop | Request | Diverged


class Disconnected(Struct, frozen=True):
    """A worker that had said hello has gone. Not sent: the agent's end makes it."""


Heard: TypeAlias = FromWorker | Disconnected


# --- from the agent -----------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """The answer to Hello."""

    v: int
    reason: str  # why the node's present generation was begun


class Kept(_Message, frozen=True):
    """The answer to Keep."""

    id: Number
    name: Name


class Recalled(_Message, frozen=True):
    """The answer to Recall and Share."""

    id: Number
    name: Name
    found: bool  # and its descriptor comes along


class Current(_Message, frozen=True):
    """The answer to AskCurrent."""

    id: Number
    current: bool | None  # None: etcd could not be asked
    reason: str  # why it is not, or why etcd could not be asked


class Leaving(_Message, frozen=True):
    """The answer to AskLeaving."""

    id: Number
    leaving: bool


class Change(_Message, frozen=True):
    """A planned change: stop with all others at one step, and park."""

    generation: Number
    reason: str
    leaving: bool  # the node leaves: exit instead


class Interrupt(_Message, frozen=True):
    """The world is broken: leave any collective at once, and park."""

    generation: Number
    reason: str


class NextWorld(_Message, frozen=True, tag="world"):
    """Go on in this generation."""

    generation: Number
    reason: str
    env: dict[str, str]  # the variables whose values have changed


class Bye(_Message, frozen=True):
    """There is nothing more to do: exit with 0."""

    reason: str


Answer: TypeAlias = Kept | Recalled | Current | Leaving
FromAgent: TypeAlias = Welcome | Answer | Change | Interrupt | NextWorld | Bye


class Gone(Struct, frozen=True):
    """The agent has gone. Not sent: the worker's end makes it."""

    reason: str


# --- from the fork server and what it forks (children/forkserver.py) ----------------------


class Warm(_Message, frozen=True):
    """The fork server has imported everything, and forks from now on."""


class Unsafe(_Message, frozen=True):
    """Nothing can be forked, or no more."""

    why: str  # a fork would break something


class CannotImport(_Message, frozen=True, tag="cannot_import"):
    """A module can't be imported."""

    module: str  # "" stands for torch
    why: str


class Forked(_Message, frozen=True):
    """The first message of a worker that has been forked."""

    pid: Number


FromForkServer: TypeAlias = Warm | Unsafe | CannotImport


# --- between torchrun's rendezvous handler and the agent beside it ------------------------


class Wanted(_Message, frozen=True):
    """torchrun runs no workers on this node, and wants the next world."""


class Done(_Message, frozen=True):
    """torchrun has ended."""

    success: bool  # its workers have done all their work


class Formed(_Message, frozen=True):
    """A world; the descriptor that comes along listens at `addr`, `port`, where this node leads."""

    generation: Number
    group_rank: Number
    nodes: Number
    addr: str
    port: Number


class Ended(_Message, frozen=True):
    """The world that was formed last ends: stop the workers, and want the next one."""


class JobOver(_Message, frozen=True, tag="over"):
    """The job is over for this node, with this exit code; the agent has ended."""

    exit_code: Number
    error: str


FromTorchrun: TypeAlias = Wanted | Done
ToTorchrun: TypeAlias = Formed | Ended | JobOver


def encode(message: Struct) -> bytes:
    """The packet of a message; a long reason or error is cut. Raises ValueError beyond LONGEST."""
    sent = {}
    for name in _TEXTS:
        if text := getattr(message, name, ""):
            sent[name] = text[:LONGEST_TEXT].encode(errors="replace").decode()
    packet = json.encode(replace(message, **sent))
    if len(packet) > LONGEST:
        name = type(message).__name__
        raise ValueError(f"{name} takes {len(packet)} bytes, {LONGEST} are allowed")
    return packet


class Reader(Generic[M]):
    """Reads the messages of one direction. Raises ValueError that names the field and its fault."""

    def __init__(self, kind: Any) -> None:
        self._decoder = json.Decoder(kind)

    def __call__(self, packet: bytes) -> M:
        try:
            return cast("M", self._decoder.decode(packet))
        except MsgspecError as error:  # in its older versions no ValueError
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError("nested too deeply") from None


from_worker = Reader[FromWorker](FromWorker)
from_agent = Reader[FromAgent](FromAgent)
from_fork_server = Reader[FromForkServer](FromForkServer)
from_forked = Reader[Forked](Forked)
from_torchrun = Reader[FromTorchrun](FromTorchrun)
to_torchrun = Reader[ToTorchrun](ToTorchrun)
