"""--preflight: the checks of a node before it joins. children/node_probe.py measures it.

Each fault says what was found, what was asked for, and what to do.
"""

import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from elastic_etcd import children
from elastic_etcd.agent.address import Reached, is_link_up, own_address
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.devices import are_visible
from elastic_etcd.agent.fitness import run, tell_unfit
from elastic_etcd.core.schema import Measured
from elastic_etcd.core.words import counted, ended, shown
from elastic_etcd.errors import UnfitNode
from elastic_etcd.etcd.client import Client
from elastic_etcd.system.limits import UNKNOWN, free_memory, free_processes, processor_statistics
from elastic_etcd.system.threads import in_thread

_PROGRAM = Path(children.__file__).with_name("node_probe.py")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - how much is free there
_MEASURED, _WITH_TORCH = 8.0, 60.0  # seconds for that program; where there are GPUs it loads torch
_SHARED, _MEMORY = 16 << 20, 256 << 20  # bytes that each worker is to find
_PROCESSES = 32  # processes and threads that each worker may start
_FILES, _FILES_EACH = 256, 32  # descriptors of an agent, and for each worker

log = logging.getLogger(__name__)


async def check_before_joining(client: Client, config: AgentConfig) -> None:
    """Raise UnfitNode, with all that was found, where this node is not fit to train."""
    if why := await why_unfit(client, config):
        raise UnfitNode(f"this node does not join: {why}.\nMend that, then start the agent again.")


async def why_unfit(client: Client, config: AgentConfig) -> str:
    """All that was found, "" for nothing; `status` shows it. Raises EtcdError, OSError."""
    reached = await own_address(config, client.endpoint, Reached())
    measure = partial(_measure, _questions(config, client.endpoint))
    try:
        speeds, faults = await in_thread(measure, 2 * _WITH_TORCH)
    except OSError as error:
        speeds, faults = (), [f"no program can be started: {error or 'it takes too long'}"]
    faults += [*_limits(config.nproc), *_link(reached)]
    if not faults and config.has_peers:
        from elastic_etcd.agent.neighbours import Neighbours  # noqa: PLC0415 - not for one alone

        faults += await Neighbours(client, config, reached.address, speeds).compare()
    if faults:
        await tell_unfit(client, config, "; ".join(faults))
    else:
        log.info("preflight: %s", ", ".join(f"{each.what} {each.speed:.0f}" for each in speeds))
    return "; ".join(faults)


def _questions(config: AgentConfig, endpoint: str) -> dict[str, dict[str, Any]]:
    """The checks that the program is to make, by name, with their arguments."""
    folders = {"--log-dir": config.log.log_dir} if config.log.log_dir != os.devnull else {}
    if config.memory_dir != AgentConfig.memory_dir:
        folders["--memory-dir"] = config.memory_dir
    asked: dict[str, dict[str, Any]] = {"processor": {"statistics": processor_statistics()}}
    asked |= {flag: {"flag": flag, "folder": folder} for flag, folder in folders.items() if folder}
    if config.etcd:  # one of this agent's own has this node's clock
        files = {name: getattr(config.etcd, name) for name in ("tls", "cacert", "cert", "key")}
        asked["clock"] = {"endpoint": endpoint, **files}
    if are_visible(os.environ):
        asked["devices"] = {}
    return asked


def _measure(asked: dict[str, dict[str, Any]]) -> tuple[tuple[Measured, ...], list[str]]:
    """The speeds of this node, and its faults. Raises OSError if no process is to be had."""
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as the workers, for its torch
    seconds = _WITH_TORCH if "devices" in asked else _MEASURED
    code, said = run([python, str(_PROGRAM), json.dumps(asked)], seconds)
    speeds, faults = [], []
    for line in said.splitlines():
        with suppress(ValueError, TypeError, LookupError):  # a library may say something, too
            name, why, found = json.loads(line)
            asked.pop(name)
            faults += [why] if why else []
            speeds += [Measured(what, speed) for what, speed in found.items()]
    asked.pop("clock", None)
    how = f"has not answered for {seconds:g} s: look at dmesg"
    if code is not None:
        last = said.strip().rpartition("\n")[2]
        how = f"can't be checked: {': '.join(filter(None, (python, ended(code), last)))}"
    faults += [f"{name} {how}" for name in asked]
    return tuple(speeds), faults


def _limits(nproc: int) -> Iterator[str]:
    """Faults of what this node's workers may use."""
    free, (files, _) = free_memory(), resource.getrlimit(resource.RLIMIT_NOFILE)
    shared, there = UNKNOWN.size, f"are free in {_SHARED_MEMORY}"
    with suppress(OSError):  # there is none
        disk = os.statvfs(_SHARED_MEMORY)
        shared = disk.f_bavail * disk.f_frsize
    allowed = UNKNOWN.size if files < 0 else files
    lines: list[tuple[int, int, Callable[[int], str], str, str]] = [
        (free.size, _MEMORY * nproc, shown, f"of {free.of} are free", "allow more"),
        (shared, _SHARED * nproc, shown, there, "make it larger (--shm-size)"),
        (free_processes(), _PROCESSES * nproc, str, "more processes are allowed", "see TasksMax="),
        (allowed, _FILES + _FILES_EACH * nproc, str, "open files are allowed", "see ulimit -n"),
    ]
    for found, needed, form, what, mend in lines:
        if found < needed:
            asked = f"{form(needed)} are asked for, for {counted(nproc, 'worker')}"
            yield f"{form(found)} {what}, {asked}: {mend}"


def _link(reached: Reached) -> Iterator[str]:
    """The fault of the interface by which others reach this node."""
    with suppress(OSError):  # it is gone meanwhile
        if reached.interface and not is_link_up(reached.interface):
            found = f"{reached.interface}, which has {reached.address}, has no link"
            yield f"{found}: look at its cable, or give another --advertise"
