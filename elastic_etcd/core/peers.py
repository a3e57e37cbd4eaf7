"""The words by which gloo, NCCL and torch say that a peer of theirs is gone."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:  # the training, which has no use for keys, loads this, too
    from elastic_etcd.core.schema import Failure

# An error of gloo's or NCCL's has no type of its own before torch 2.4, and gloo's has none today.
_TEXTS = (
    "gloo/",  # the source file that gloo puts before its message
    "gloo::",
    "Gloo connectFullMesh failed",
    "Application timeout caused pair closure",  # gloo's, after an error that was caught
    "failed to pass monitoredBarrier",  # TORCH_DISTRIBUTED_DEBUG=DETAIL waits there
    "NCCL error",
    "NCCL communicator was aborted",
    "ncclSystemError",
    "ncclRemoteError",
    "ncclInternalError",
)
_ERRORS = tuple(f"torch.distributed.Dist{kind}Error" for kind in ("Backend", "Network", "Store"))
# No peer causes these, whoever says it: NCCL raises them when it is used wrongly, and a DataLoader
# what its own process has met, a file system's "Connection reset by peer" for one.
_OWN = (
    "ncclInvalidUsage",
    "ncclInvalidArgument",
    "out of memory",
    "in DataLoader worker process",
    "in pin memory thread",
)


LOST = "it lost its peers: "  # before what a worker says that parked for no reason of its agent's


def names_own_mistake(text: str) -> bool:
    """Whether what an exception says is the script's own doing, whatever its type."""
    return any(words in text for words in _OWN)


def names_lost_peer(text: str) -> bool:
    """Whether what an exception says is that a peer is gone."""
    return not names_own_mistake(text) and any(words in text for words in _TEXTS)


def ends_with_lost_peer(stack: str) -> bool:
    """Whether a traceback says that a peer is gone; its frames, the indented lines, don't count."""
    said = "\n".join(line for line in stack.splitlines() if not line.startswith(" "))
    if names_own_mistake(said):
        return False
    return names_lost_peer(said) or any(error in said for error in _ERRORS)


def blames_peers(failure: "Failure") -> bool:
    """Whether a worker's own words are that its peers are gone, and nothing else was found out."""
    return not failure.hang and (
        failure.message.startswith(LOST) or ends_with_lost_peer(failure.message)
    )


def was_left(failure: "Failure", left: str) -> "Failure":
    """The failure of a worker whose peers have ended before it: `left` says who they are, and how.

    It is nobody's, since a node that has done its work is not to be left out for that.
    """
    where = f"in step {failure.step}" if failure.step else "at work"
    told = f"{left} while rank {failure.rank} on {failure.node} was {where}"
    return replace(failure, node="", rank=0, local_rank=0, pid=0, code=0, hang=told)


def is_left(failure: "Failure") -> bool:
    """Whether it is such a failure, and no hang: the words of the worker are there."""
    return bool(failure.hang and failure.message and not failure.node)
