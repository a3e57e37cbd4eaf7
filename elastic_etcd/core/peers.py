"""What gloo, NCCL and torch say when a peer of theirs is gone."""

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
_ERRORS = tuple(f"torch.distributed.Dist{kind}Error" for kind in ("Backend", "Network", "Store"))


def names_lost_peer(text: str) -> bool:
    """Whether what an exception says is that a peer is gone."""
    return any(words in text for words in _TEXTS)


def ends_with_lost_peer(stack: str) -> bool:
    """The same of a whole traceback; the lines of its frames are indented and say nothing."""
    said = "\n".join(line for line in stack.splitlines() if not line.startswith(" "))
    return names_lost_peer(said) or any(error in said for error in _ERRORS)
