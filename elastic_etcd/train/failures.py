"""Which exceptions mean that a peer is gone, and which are the user's own."""

import torch
import torch.distributed as dist

from elastic_etcd.core.peers import names_lost_peer


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
        if type(cause) in _RUNTIME and (broken or names_lost_peer(str(cause))):
            return True
        cause = cause.__cause__
    return False


_RUNTIME = {RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)}
