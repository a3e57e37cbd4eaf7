"""Which exceptions mean that a peer is gone, and which are the user's own."""

import torch
import torch.distributed as dist

# What gloo and NCCL raise has no type of its own before torch 2.4, and gloo's has none today.
_TEXTS = (
    "gloo/",  # the source file that gloo puts before its message
    "gloo::",
    "Gloo connectFullMesh failed",
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "NCCL error",
    "NCCL communicator was aborted",
    "ncclSystemError",
    "ncclRemoteError",
    "ncclInternalError",
)


def is_communication_failure(error: BaseException, *, broken: bool) -> bool:
    """Whether `error`, or an error that it was raised from, comes from a collective that failed.

    In a world that is known to be `broken` any RuntimeError of torch's is taken for a result of
    that: what is cut off in the middle fails in many ways.
    """
    cause: BaseException | None = error
    while cause is not None:
        # QueueEmptyError and time-outs of a store come from its users' keys, too.
        if isinstance(cause, dist.DistError):
            return True
        if type(cause) in _RUNTIME and (broken or any(text in str(cause) for text in _TEXTS)):
            return True
        cause = cause.__cause__
    return False


_RUNTIME = {RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)}
