"""Asks the kernel for what a process wants to be told or given when others end (prctl)."""

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(number: int) -> None:
    """Get this signal when the thread that has started this process ends. Raises OSError."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, int(number))


def adopt_orphans(*, wanted: bool) -> None:
    """Get the orphans of this process's children as children, instead of init. Raises OSError."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, int(wanted))


def _prctl(name: str, option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({name}): {os.strerror(number)}")
