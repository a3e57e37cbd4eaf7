"""The words for a snapshot of a state that finds too little free memory."""

from elastic_etcd.core.words import shown
from elastic_etcd.errors import WrongHere
from elastic_etcd.system.limits import free_memory


def check_memory(size: int, lacking: int) -> None:
    """Raise UsageError, with the figures, when `lacking` more bytes for two snapshots are not free.

    size: of one snapshot, in bytes.
    """
    if shortage := shortage_of(lacking):
        two = f"a snapshot of this state takes {shown(size)}, and there are two of them"
        raise WrongHere(f"{two}: {shortage}. Give this node more, or keep less in the state")


def shortage_of(size: int) -> str:
    """The figures, if so many bytes are not free; "" if they are."""
    free = free_memory()
    if size <= free.size:
        return ""
    needed = f"{shown(size)} more of host memory are needed"
    return f"{needed}, {shown(free.size)} of {free.of} are free"
