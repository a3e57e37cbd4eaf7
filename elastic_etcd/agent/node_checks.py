"""The checks of one node that `elastic-etcd check` makes, but for those of etcd.

The kernel's limits are read here. Disks, the clock and devices may hang, so that a program of its
own looks at them (children/node_probe.py).
"""

import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_etcd import children
from elastic_etcd.agent.address import find_address, is_link_up
from elastic_etcd.agent.fitness import run
from elastic_etcd.core import words
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.system.limits import UNKNOWN, free_memory, free_processes

_PROGRAM = Path(children.__file__).with_name("node_probe.py")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - how much is free there
_MEASURED, _WITH_TORCH = 8.0, 50.0  # seconds for that program, less than --health-check has
_SHARED, _MEMORY = 16 << 20, 256 << 20  # bytes that each worker is to find
_PROCESSES = 32  # processes and threads that each worker may start
_FILES, _FILES_EACH = 256, 32  # descriptors of an agent, and for each worker


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    found: str
    cure: str = ""  # what to do; "" where nothing is wrong


def limits(nproc: int) -> Iterator[CheckResult]:
    """Say how much this node's workers may use."""
    free, (files, _) = free_memory(), resource.getrlimit(resource.RLIMIT_NOFILE)
    shared, there = UNKNOWN.size, f"are free in {_SHARED_MEMORY}"
    with suppress(OSError):  # there is none
        disk = os.statvfs(_SHARED_MEMORY)
        shared = disk.f_bavail * disk.f_frsize
    least_files = _FILES + _FILES_EACH * nproc
    processes, open_allowed = free_processes(), UNKNOWN.size if files < 0 else files
    lines: list[tuple[str, int, int, Callable[[int], str], str, str]] = [
        ("memory", free.size, _MEMORY * nproc, words.shown, f"of {free.of} are free", "allow more"),
        ("shm", shared, _SHARED * nproc, words.shown, there, "make it larger (--shm-size)"),
        ("processes", processes, _PROCESSES * nproc, str, "more are allowed", "see TasksMax="),
        ("descriptors", open_allowed, least_files, str, "are allowed", "see ulimit -n"),
    ]
    for name, found, needed, form, what, cure in lines:
        enough = found >= needed
        told = f"{'no limit' if found >= UNKNOWN.size else f'{form(found)} {what}'}"
        asked = f"{form(needed)} are asked for, for {words.counted(nproc, 'worker')}"
        yield CheckResult(name, told if enough else f"{told}, {asked}", "" if enough else cure)


def measured(asked: dict[str, dict[str, Any]]) -> list[CheckResult]:
    """Ask the program. Raises OSError if no process is to be had."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as the workers, for its torch
    limit = _WITH_TORCH if "devices" in asked else _MEASURED
    code, said = run([python, str(_PROGRAM), json.dumps(asked)], limit)
    found = [] if "devices" in asked else [CheckResult("devices", "no GPU is visible")]
    for line in said.splitlines():
        with suppress(ValueError, TypeError, LookupError):  # a library may say something, too
            name, why, cure = json.loads(line)
            asked.pop(name)
            found.append(CheckResult(name, why, cure))
    how, cure = f"has not answered for {limit:g} s", "look at dmesg"
    if code is not None:
        last = said.strip().rpartition("\n")[2]
        how = f"can't be checked: {': '.join(filter(None, (python, words.ended(code), last)))}"
        cure = "mend that Python"
    found += [CheckResult(name, how, cure) for name in asked if name != "clock"]
    return found


def address(advertise: str | None, endpoint: str) -> list[CheckResult]:
    """Find the address by which others reach this node, and whether its interface has a link."""
    try:
        reached = find_address(advertise, endpoint, several=True)
    except ElasticEtcdError as error:
        return [
            CheckResult(
                "address", str(error), "check the name of etcd, or give another --advertise"
            )
        ]
    found = [CheckResult("address", f"other nodes reach this one at {reached.address}")]
    up = True
    with suppress(OSError):  # it is gone meanwhile
        up = not reached.interface or is_link_up(reached.interface)
    text = f"{reached.interface or 'its interface'}, which has {reached.address}, has "
    cure = "" if up else "look at its cable, or give another --advertise"
    return [*found, CheckResult("link", text + ("a link" if up else "no link"), cure)]
