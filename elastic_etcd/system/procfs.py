"""Reads /proc: which processes there are, their parents and groups, and their environment.

A process may end between two reads. A number that belongs to another process by then is the
caller's to refuse, see `pidfds.open_if`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_etcd.system.pidfds import NO_DESCRIPTOR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@dataclass(frozen=True, slots=True)
class Stat:
    """A process as the kernel shows it."""

    name: str
    state: str
    parent: int
    group: int
    started: int  # in ticks of the kernel's clock since the boot


def stat(pid: int) -> Stat | None:
    """How the kernel shows a process; None if it is gone, or hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return None
    # "pid (name) state ppid pgrp ...": the name may hold anything, spaces and brackets
    begin, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split(maxsplit=20)
    name = text[begin + 1 : end].decode(errors="replace")
    return Stat(name, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[19]))


def environment(pid: int, names: Collection[str]) -> dict[str, str]:
    """Those of these variables that a process of this user had when it began; {} if it is gone.

    Call it in a thread: the kernel makes readers wait for a process that it holds at a bad moment.
    """
    folder = Path(f"/proc/{pid}")
    try:
        own = folder.stat().st_uid == os.geteuid()
        text = (folder / "environ").read_bytes() if own else b""
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return {}  # gone meanwhile, or hidden
    if not any(name.encode() in text for name in names):  # most processes: there may be thousands
        return {}
    items = text.decode(errors="surrogateescape").split("\0")
    pairs = (item.partition("=") for item in items)
    return {name: value for name, _, value in pairs if name in names}


def pids() -> Iterator[int]:
    """The number of every process that this one may see."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
