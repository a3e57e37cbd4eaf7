"""The checks of one node, and of etcd as it is reached from there, that `elastic-etcd check` makes.

The kernel's limits are read here. Disks, the clock and devices may hang, so that a program of its
own looks at them (children/node_probe.py).
"""

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from elastic_etcd import children
from elastic_etcd.agent.address import find_address, is_link_up
from elastic_etcd.agent.config import BESIDE_AGENT, AgentConfig
from elastic_etcd.agent.devices import are_visible
from elastic_etcd.core import words
from elastic_etcd.core.txn import Get, Put, Snapshot, Txn
from elastic_etcd.errors import ElasticEtcdError, EtcdError
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import first
from elastic_etcd.system.child_process import run_briefly
from elastic_etcd.system.limits import UNKNOWN, free_memory, free_processes
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import HEALTH_TIMEOUT, LOOK_UP

_PROGRAM = Path(children.__file__).with_name("node_probe.py")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - how much is free there
_MEASURED, _WITH_TORCH = 8.0, 50.0  # seconds for that program, less than --health-check has
_SHARED, _MEMORY = 16 << 20, 256 << 20  # bytes that each worker is to find
_PROCESSES = 32  # processes and threads that each worker may start
_FILES, _FILES_EACH = 256, 32  # descriptors of an agent, and for each worker
_LEASE = 10  # seconds, after which etcd removes what this command could not


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check."""

    name: str
    found: str
    cure: str = ""  # what to do; "" where nothing is wrong


@dataclass(frozen=True)
class NodeFlags:
    """This node, and etcd, as the command line describes them."""

    nproc: int
    log_dir: str | None
    memory_dir: str
    advertise: str | None
    prefix: str
    timeout: float  # seconds for each answer of etcd


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
    code, said = run_briefly([python, str(_PROGRAM), json.dumps(asked)], limit)
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


async def check(config: EtcdConfig | None, given: NodeFlags) -> list[CheckResult]:
    """Make all checks. A node whose etcd can't be reached is checked, too.

    Beside an agent etcd is not asked, nor is its name looked up: an outage is to end no training.
    """
    found = [*limits(given.nproc)]
    look = partial(measured, _questions(given, config))
    skipped = "not asked, as there is no --etcd"
    if config and BESIDE_AGENT in os.environ:
        config, skipped = None, "not asked, as the agent does that"
    endpoint = config.endpoints[0] if config else "127.0.0.1:2379"  # whatever way others come
    try:
        found += await in_thread(look, 2 * HEALTH_TIMEOUT)
    except OSError as error:
        why = f"no program can be started: {error or 'it takes too long'}"
        found.append(CheckResult("processes", why, "see TasksMax= and the system's disk"))
    find = partial(address, given.advertise, endpoint)
    try:
        found += await in_thread(find, LOOK_UP)
    except TimeoutError:
        why = f"the name of etcd at {endpoint} was not looked up within {LOOK_UP:.0f} s"
        found.append(CheckResult("address", why, "check the resolver, or give --advertise"))
    if config is None:
        return [*found, CheckResult("etcd", skipped)]
    async with Client(config) as client:
        return [*found, *[each async for each in _etcd(client, given)]]


def _questions(given: NodeFlags, config: EtcdConfig | None) -> dict[str, dict[str, Any]]:
    """The checks that the program is to make, by name, with their arguments."""
    folders = {"TMPDIR": tempfile.gettempdir()}
    if given.log_dir not in (None, os.devnull):
        folders["--log-dir"] = given.log_dir
    if given.memory_dir != AgentConfig.memory_dir:
        folders["--memory-dir"] = given.memory_dir
    asked: dict[str, dict[str, Any]] = {
        f"disk of {flag}": {"folder": folder} for flag, folder in folders.items()
    }
    if config:
        files = {name: getattr(config, name) for name in ("tls", "cacert", "cert", "key")}
        asked["clock"] = {"endpoint": config.endpoints[0], **files}
    if are_visible(os.environ):
        asked["devices"] = {}
    return asked


async def _etcd(client: Client, given: NodeFlags) -> AsyncIterator[CheckResult]:
    """Reach etcd, and make a lease, a Txn and a watch there, up to the first that fails."""
    folder = Get(f"{given.prefix}/check-{os.urandom(4).hex()}/", prefix=True)
    name, lease, cure = "etcd", 0, "see whether it runs, and --etcd, --cacert, --user"
    try:
        began = time.monotonic()
        await client.range(folder, timeout=given.timeout)
        took = 1e3 * (time.monotonic() - began)
        yield CheckResult(name, f"{client.endpoint} answers in {took:.0f} ms")
        name, cure = "lease", f"let its user write under {given.prefix}, and look at its disk"
        lease = (await client.grant(_LEASE, given.timeout)).id
        yield CheckResult(name, f"granted for {_LEASE} s")
        name = "txn"
        await client.txn(Txn((), (Put(f"{folder.key}key", "", lease),)), given.timeout)
        yield CheckResult(name, f"written under {given.prefix}")
        name = "watch"
        async with asyncio.timeout(given.timeout):
            await _see_a_change(client, folder, lease)
        yield CheckResult(name, "it tells of a change")
    except EtcdError as error:
        yield CheckResult(name, str(error).replace("\n", " ").rstrip("."), cure)
    except TimeoutError:
        yield CheckResult(name, f"it told of no change within {given.timeout:g} s", cure)
    finally:
        if lease:
            with suppress(EtcdError):  # it ends by itself
                await client.revoke(lease, given.timeout)


async def _see_a_change(client: Client, folder: Get, lease: int) -> None:
    """Write a key that is watched, and wait for that. Raises EtcdError."""
    listed, key = asyncio.Event(), f"{folder.key}key"

    def look(seen: Snapshot) -> bool | None:
        listed.set()
        return True if key in seen.kvs and seen.kvs[key].value else None

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(first(client, (folder,), look))
            await listed.wait()
            await client.txn(Txn((), (Put(key, "changed", lease),)))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
