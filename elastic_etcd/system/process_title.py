"""The title of a forked worker in `ps` and nvidia-smi: `elastic_etcd: train.py rank 3 (resnet-7)`.

It is written over the fork server's command line, in the memory where the kernel reads that. The
environment behind it, by whose mark leftovers are found, stays. Standard library only.
"""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

_NAME = "elastic_etcd: "
_ARG_START, _ARG_END = 45, 46  # among the fields of /proc/self/stat behind the program's name


def show_worker(script: str, rank: str, job: str) -> None:
    """Show this, as much of it as there is room for."""
    with suppress(OSError):  # no /proc
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        title = os.fsencode(f"{_NAME}{script} rank {rank} ({job})")
        if room := max(0, end - start):
            ctypes.memmove(start, title[: room - 1].ljust(room, b"\0"), room)


def show_rank(rank: str) -> None:
    """Show another rank, where there is a title."""
    with suppress(OSError):
        shown = os.fsdecode(Path("/proc/self/cmdline").read_bytes().rstrip(b"\0"))
        if known := re.fullmatch(rf"{_NAME}(.*) rank \d+ \((.*)\)", shown, re.DOTALL):
            show_worker(known[1], rank, known[2])
