"""`ee.memory_checkpoint`: checkpoints in any format, as folders in memory that outlives the worker.

The agent made the directory, and removes it at its end. The directory is the node's own;
latest_checkpoint.py brings nodes together.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_etcd.errors import UsageError, WrongHere
from elastic_etcd.train.checkpoint.checkpoint_folder import (
    Checkpoint,
    Target,
    aside,
    free_in,
    memory_of,
    too_small,
)
from elastic_etcd.train.collectives import generation

_FULL = 1 << 16  # bytes: where fewer are free no more can be written
_last: dict[Path, int] = {}  # by directory in memory: the step of what was written or read last

log = logging.getLogger(__name__)


@contextmanager
def memory_checkpoint(
    step: int,
    *,
    every: int = 1,
    disk: str | os.PathLike[str] | None = None,
    disk_every: int | None = None,
    sharded: bool = False,
) -> Iterator[Path | None]:
    """A folder for a checkpoint in this node's memory; None if none is due after `step` steps.

        with ee.memory_checkpoint(step, every=10, disk="checkpoints", disk_every=1000) as folder:
            if folder and os.environ["LOCAL_RANK"] == "0":
                torch.save(state, folder / "state.pt")

    step: of the optimizer, counted from 0. A checkpoint is due when it is a multiple of `every`,
    but not for the step that training began with or that was written last: with gradients that are
    accumulated a callback comes several times after the same step. When `step` is a multiple of
    `disk_every`, rank 0 copies its checkpoint to a folder in `disk`, too, and removes none there.

    The files that the first worker of a node (local rank 0) has written into its folder, in any
    format, are a checkpoint of that node when the block ends; those of other workers are dropped,
    and so is everything when the block raises. A checkpoint that is written on one node only goes
    with that node.

    sharded: each worker writes its part of a state that is spread over all of them, as
    `torch.distributed.checkpoint` does, and all workers of a node into one folder. The block is
    collective then, on the default process group, and when it ends each file is on as many nodes as
    `--copies` says. After a restart, in a world of any size, each node gets the files of all:

        with ee.memory_checkpoint(step, every=10, sharded=True) as folder:
            if folder:
                dcp.save({"app": app}, checkpoint_id=folder)

    The node keeps the newest, and the one before it until the next is begun, so that it takes twice
    its size. `ee.latest_checkpoint` finds the newest after a restart.

    Without our launcher there is no such memory, and a checkpoint is due for `disk` only. Raises
    UsageError if there is neither, and with the figures, in bytes, when the memory is too small.
    See docs/memory.md.
    """
    target = _target(step, every, disk, disk_every)
    if target and sharded:
        from elastic_etcd.train.checkpoint.sharded_checkpoint import ShardedTarget  # noqa: PLC0415 - loads the agent's channel

        target = ShardedTarget.of(target)
    if target is None:
        yield None
        return
    target.begin()
    try:
        with _shortage_explained(target.folder, sharded=sharded):
            yield target.folder
            target.finish()
        remember(target.folder.parent, step)
    finally:
        target.clear()


def remember(root: Path, step: int) -> None:
    """The checkpoint of this step is there, or training goes on from it: it is not due again."""
    _last[root] = step


def _target(
    step: int, every: int, disk: str | os.PathLike[str] | None, disk_every: int | None
) -> Target | None:
    memory = memory_of(os.environ)
    due_on_disk = _due_on_disk(step, every, disk, disk_every)
    if memory is None and disk is None:
        raise UsageError(
            "ee.memory_checkpoint: there is no memory that outlives this process without "
            "`python -m elastic_etcd.launch`; give disk= to write checkpoints there instead"
        )
    if step % every or _last.get(memory, 0) == step if memory else not due_on_disk:
        return None
    checkpoint = Checkpoint(step, generation())
    local_rank = os.environ.get("ELASTIC_ETCD_LOCAL_RANK", "0")
    first = os.environ.get("RANK", "0") == "0"
    root = Path(disk).absolute() if first and due_on_disk and disk else None
    if memory:
        saves = memory if local_rank == "0" else None
        return Target(checkpoint, memory / f".{local_rank}", saves, root)
    folder = (root or Path(tempfile.gettempdir())) / aside(checkpoint.name)
    return Target(checkpoint, folder, disk=root)


def _due_on_disk(
    step: int, every: int, disk: str | os.PathLike[str] | None, disk_every: int | None
) -> bool:
    of_disk = every if disk_every is None else disk_every
    if step < 0 or every < 1 or of_disk < 1 or of_disk % every:
        raise UsageError(
            f"ee.memory_checkpoint({step}, every={every}, disk_every={disk_every}): steps are "
            "counted from 0, every is at least 1, and disk_every a multiple of it"
        )
    return disk is not None and step % of_disk == 0


@contextmanager
def _shortage_explained(folder: Path, *, sharded: bool) -> Iterator[None]:
    """Raise UsageError for an error that comes of a full memory; torch's writer hides that.

    With a memory that is gone a checkpoint is lost, and nothing else: that is a warning, unless
    other nodes wait for this one's part.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        memory = os.environ.get("ELASTIC_ETCD_MEMORY")
        if memory == str(folder.parent) and not folder.parent.exists() and not sharded:
            log.warning("a checkpoint is lost: %s was removed while it was written", memory)
            return
        free = free_in(folder.parent)
        if free.size >= _FULL or memory_of(os.environ) is None:
            raise
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        raise WrongHere(too_small(folder.parent, "this checkpoint", written, free)) from error
