"""`elastic-etcd check`: says whether this node is fit for a job, and what a job finds of etcd here.

`--health-check "elastic-etcd check"` keeps a node that is not fit out of a job.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.devices import are_visible, count_devices
from elastic_etcd.agent.fitness import BESIDE_AGENT
from elastic_etcd.agent.node_checks import CheckResult, address, limits, measured
from elastic_etcd.cli import parsers
from elastic_etcd.cli.flag_values import seconds
from elastic_etcd.cli.flags import CONNECTION, FLAGS, Flag
from elastic_etcd.cli.parsers import shown
from elastic_etcd.cli.query import JSON_VERSION, in_one_line
from elastic_etcd.core.txn import Get, Put, Snapshot, Txn
from elastic_etcd.errors import ElasticEtcdError, EtcdError
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import first
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import HEALTH_TIMEOUT, LOOK_UP

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncIterator, Sequence

    from elastic_etcd.etcd.access import EtcdConfig

UNFIT = 10  # the exit code

_LEASE = 10  # seconds, after which etcd removes what this command could not
_OWN_FLAGS = ("--nproc-per-node", "--log-dir", "--memory-dir", "--advertise")
_EPILOG = """\
A line for each check: what was found and, where that is wrong, what to do. What is wrong comes
last. In etcd it makes a lease, a Txn and a watch of keys under --prefix that it removes again.

examples:
  elastic-etcd check --etcd etcd1:2379 --nproc-per-node gpu
  python -m elastic_etcd.launch --health-check "elastic-etcd check" ...

exit codes:
  0 all is well     2 wrong usage     10 something is wrong     130 ended by Ctrl-C
"""


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd check`."""
    made = parsers.Parser(
        prog="elastic-etcd check",
        usage="elastic-etcd check [options]",
        description="Says whether this node is fit for a job, and reaches etcd.",
        epilog=_EPILOG,
        formatter_class=parsers.Help,
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    own = (flag for flag in FLAGS if flag.long[0] in _OWN_FLAGS)
    parsers.add_flags(made, "node", own, os.environ)
    timeout = Flag("--timeout", "how long to wait for each answer of etcd", seconds, default=5.0)
    parsers.add_flags(made, "etcd", (*CONNECTION, timeout), os.environ)
    return made


def main(argv: Sequence[str]) -> int:
    """Check this node, and print what was found; gives the exit code."""
    try:
        args = parser().parse_args(argv)
        config = parsers.etcd_of(args, os.environ)
        nproc = count_devices(args.nproc_per_node)
        found = asyncio.run(_check(args, config, nproc))
    except ElasticEtcdError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    fit = not any(each.cure for each in found)
    if args.json:
        checks = [asdict(each) for each in found]
        print(json.dumps({"version": JSON_VERSION, "fit": fit, "checks": checks}, indent=2))
    else:
        for each in sorted(found, key=lambda each: bool(each.cure)):
            what = f"wrong: {each.found}: {each.cure}" if each.cure else f"ok: {each.found}"
            print(in_one_line(f"{each.name}: {what}"))
    return 0 if fit else UNFIT


async def _check(args: Namespace, config: EtcdConfig | None, nproc: int) -> list[CheckResult]:
    """Make all checks. A node whose etcd can't be reached is checked, too.

    Beside an agent etcd is not asked, nor is its name looked up: an outage is to end no training.
    """
    found = [*limits(nproc)]
    look = partial(measured, _questions(args, config))
    skipped = "not asked, as there is no --etcd"
    if config and BESIDE_AGENT in os.environ:
        config, skipped = None, "not asked, as the agent does that"
    endpoint = config.endpoints[0] if config else "127.0.0.1:2379"  # whatever way others come
    try:
        found += await in_thread(look, 2 * HEALTH_TIMEOUT)
    except OSError as error:
        why = f"no program can be started: {error or 'it takes too long'}"
        found.append(CheckResult("processes", why, "see TasksMax= and the system's disk"))
    find = partial(address, args.advertise, endpoint)
    try:
        found += await in_thread(find, LOOK_UP)
    except TimeoutError:
        why = f"the name of etcd at {endpoint} was not looked up within {LOOK_UP:.0f} s"
        found.append(CheckResult("address", why, "check the resolver, or give --advertise"))
    if config is None:
        return [*found, CheckResult("etcd", skipped)]
    async with Client(config) as client:
        return [*found, *[each async for each in _etcd(client, args)]]


def _questions(args: Namespace, config: EtcdConfig | None) -> dict[str, dict[str, Any]]:
    """The checks that the program is to make, by name, with their arguments."""
    folders = {"TMPDIR": tempfile.gettempdir()}
    if args.log_dir not in (None, os.devnull):
        folders["--log-dir"] = args.log_dir
    if args.memory_dir != AgentConfig.memory_dir:
        folders["--memory-dir"] = args.memory_dir
    asked: dict[str, dict[str, Any]] = {
        f"disk of {flag}": {"folder": folder} for flag, folder in folders.items()
    }
    if config:
        files = {name: getattr(config, name) for name in ("tls", "cacert", "cert", "key")}
        asked["clock"] = {"endpoint": config.endpoints[0], **files}
    if are_visible(os.environ):
        asked["devices"] = {}
    return asked


async def _etcd(client: Client, args: Namespace) -> AsyncIterator[CheckResult]:
    """Reach etcd, and make a lease, a Txn and a watch there, up to the first that fails."""
    folder = Get(f"{args.prefix}/check-{os.urandom(4).hex()}/", prefix=True)
    name, lease, cure = "etcd", 0, "see whether it runs, and --etcd, --cacert, --user"
    try:
        began = time.monotonic()
        await client.range(folder, timeout=args.timeout)
        took = 1e3 * (time.monotonic() - began)
        yield CheckResult(name, f"{client.endpoint} answers in {took:.0f} ms")
        name, cure = "lease", f"let its user write under {args.prefix}, and look at its disk"
        lease = (await client.grant(_LEASE, args.timeout)).id
        yield CheckResult(name, f"granted for {_LEASE} s")
        name = "txn"
        await client.txn(Txn((), (Put(f"{folder.key}key", "", lease),)), args.timeout)
        yield CheckResult(name, f"written under {args.prefix}")
        name = "watch"
        async with asyncio.timeout(args.timeout):
            await _see_a_change(client, folder, lease)
        yield CheckResult(name, "it tells of a change")
    except EtcdError as error:
        yield CheckResult(name, str(error).replace("\n", " ").rstrip("."), cure)
    except TimeoutError:
        yield CheckResult(name, f"it told of no change within {args.timeout:g} s", cure)
    finally:
        if lease:
            with suppress(EtcdError):  # it ends by itself
                await client.revoke(lease, args.timeout)


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
