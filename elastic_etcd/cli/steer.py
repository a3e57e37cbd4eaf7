"""`elastic-etcd drain`, `undrain` and `stop`: what people want of a job, told through etcd.

Each changes the one key that says it, as long as nobody else has changed it since it was read. It
takes the right to read the job and to write that key; what follows is in core/wanted.py.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import random
import sys
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from elastic_etcd.cli import options
from elastic_etcd.cli.options import shown
from elastic_etcd.core import wanted
from elastic_etcd.core.lifecycle import Outdated
from elastic_etcd.core.schema import MOST_DRAINS, Drain, Halt, Keys, Wanted, encode, hexed
from elastic_etcd.core.txn import Compare, Delete, Put, Txn
from elastic_etcd.core.view import Everything, View, covered, view_of
from elastic_etcd.errors import ElasticEtcdError, NotInTime, UsageError
from elastic_etcd.etcd.client import Client
from elastic_etcd.etcd.mirror import first
from elastic_etcd.etcd.retry import now
from elastic_etcd.times import STOP_PATIENCE, UNKILLABLE

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from elastic_etcd.core.schema import Limits, Member, Spec
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.etcd.config import EtcdConfig

_PAUSE = 0.2  # seconds at most, until a key that others change, too, is read again

_CODES = """\
exit codes:
  0 done, or it was so before     1 no such job or node, or the job is over   2 wrong usage
  4 --wait: not within its time   5 etcd unreachable, or denied
"""
_DRAIN = f"""\
The node leaves as on SIGTERM to its agent: scripts in ee.run stop at a step that all ranks agree
on, others get SIGTERM; `ee.leaving()` is true, they may save until the deadline, and the other
nodes go on without it. Its agent exits 143. One that is started there again waits until `undrain`.

examples:
  elastic-etcd drain resnet-7 node2 --etcd etcd1:2379 --wait && ssh node2 reboot
  elastic-etcd undrain resnet-7 node2 --etcd etcd1:2379
  elastic-etcd drain resnet-7 --self --wait     # in a container, as Kubernetes' preStop hook

{_CODES}"""
_UNDRAIN = f"""\
An agent that waits there joins at once. Where none waits, start one.

{_CODES}"""
_STOP = f"""\
All nodes leave at once. Scripts in ee.run stop at a step that all ranks agree on, others get
SIGTERM and --shutdown-timeout (30 s by default). With --save `ee.leaving()` is true, and they have
--leave-deadline to save, as on SIGTERM to every agent. The job's outcome is `stopped`, its agents
exit 143. Agents that are started after that begin a new run.

examples:
  elastic-etcd stop resnet-7 --etcd etcd1:2379 --save --wait

{_CODES}"""


def drain(argv: Sequence[str]) -> int:
    """`elastic-etcd drain JOB NODE`; gives the exit code."""
    parser = _parser("drain", "JOB NODE", "Makes a node leave a job, and keeps it out.", _DRAIN)
    parser.add_argument("node", metavar="NODE", nargs="?", type=options.name, help="its name")
    parser.add_argument(
        "--self",
        action="store_true",
        help="this machine's node (PET_NODE_NAME or SLURMD_NODENAME, else its host name), and "
        "only the agent that is there now: the next one that is started joins",
    )
    parser.add_argument(
        "--deadline",
        type=options.seconds,
        metavar="SECONDS",
        help="from now to SIGKILL of its workers (default: the job's --leave-deadline)",
    )
    parser.add_argument("--wait", action="store_true", help="return when the node has left")
    return _run(parser, argv, _drain)


def undrain(argv: Sequence[str]) -> int:
    """`elastic-etcd undrain JOB NODE`; gives the exit code."""
    parser = _parser("undrain", "JOB NODE", "Lets a node that was drained come back.", _UNDRAIN)
    parser.add_argument("node", metavar="NODE", type=options.name, help="its name")
    return _run(parser, argv, _undrain)


def stop(argv: Sequence[str]) -> int:
    """`elastic-etcd stop JOB`; gives the exit code."""
    parser = _parser("stop", "JOB", "Ends a job on all of its nodes.", _STOP)
    parser.add_argument("--save", action="store_true", help="wait for what the scripts save")
    parser.add_argument("--wait", action="store_true", help="return when the job has ended")
    return _run(parser, argv, _stop)


def _parser(command: str, arguments: str, description: str, epilog: str) -> options.Parser:
    parser = options.Parser(
        prog=f"elastic-etcd {command}",
        usage=f"elastic-etcd {command} [options] {arguments}",
        description=description,
        epilog=epilog,
        formatter_class=options.Help,
    )
    parser.add_argument("job", metavar="JOB", type=options.job_id, help="the job's id")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    group = options.Group(parser, "etcd", os.environ)
    options.connection(group)
    group.flag("--timeout", type=options.seconds, default=5, metavar="SECONDS", help="(default: 5)")
    return parser


def _run(parser: options.Parser, argv: Sequence[str], command: Callable[..., Any]) -> int:
    try:
        args = parser.parse_args(argv)
        config = options.etcd_of(args, os.environ)
        if config is None:
            raise UsageError("which etcd? Give --etcd HOST:2379, or set ETCDCTL_ENDPOINTS.")
        done = asyncio.run(_in_job(config, args, command))
    except ElasticEtcdError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps(done, indent=2))
        return 0
    print(shown(done["told"]))
    if done.get("note"):
        print(f"note: {shown(done['note'])}", file=sys.stderr)
    return 0


async def _in_job(config: EtcdConfig, args: Namespace, command: Callable[..., Any]) -> Any:
    async with Client(config) as client:
        job = Job(client, args.job, Keys(f"{args.prefix}/{args.job}"), args.timeout)
        return {"job": args.job} | await command(job, args)


class Job:
    """A job as it is in etcd, seen from outside."""

    def __init__(self, client: Client, name: str, keys: Keys, timeout: float) -> None:
        self.name, self.keys = name, keys
        self._client, self._timeout = client, timeout

    async def change(self, change: Callable[[View], Wanted]) -> tuple[View, bool]:
        """Write what `change` makes of a view; gives that view, and whether there was a change.

        `change` raises ElasticEtcdError where it makes no sense. Raises NotInTime when others
        change the key again and again.
        """
        end = now() + self._timeout
        while True:
            seen = await self._client.range(*self._all, timeout=self._timeout)
            view = self._view(seen)
            then, there = change(view), view.wanted or Wanted()
            if then == there or await self._written(seen, then):
                return view, then != there
            if now() > end:
                raise NotInTime(f"others change {self.keys.wanted} again and again: try later")
            await asyncio.sleep(random.uniform(0, _PAUSE))  # noqa: S311 - no secret

    async def wait(self, what: str, until: Callable[[View], bool], seconds: float) -> View:
        """The first view for which `until` holds. Raises NotInTime."""

        def look(snapshot: Snapshot) -> View | None:
            view = view_of(snapshot, self.keys, Everything())
            return view if until(view) else None

        try:
            async with asyncio.timeout(seconds):
                return await first(self._client, self._all, look)
        except TimeoutError:
            raise NotInTime(f"after {seconds:g} s {what}; what was asked for stands") from None

    def run_of(self, view: View) -> Spec:
        """The run that goes on. Raises ElasticEtcdError where there is none."""
        if view.outcome:
            outcome = view.outcome
            when = f" at {outcome.at}" if outcome.at else ""
            raise ElasticEtcdError(f"job {self.name} is over: {outcome.state}{when}")
        if view.spec is None:
            raise ElasticEtcdError(f"job {self.name} has no run that goes on")
        return view.spec

    @property
    def _all(self) -> tuple[Any, ...]:
        return covered(self.keys, Everything())

    def _view(self, seen: Snapshot) -> View:
        view = view_of(seen, self.keys, Everything())
        if view.newer:
            raise UsageError(Outdated(view.newer).reason)
        if not (view.round or view.outcome or view.members or view.history or view.wanted):
            raise ElasticEtcdError(f"etcd has no job at {self.keys.root}")
        return view

    async def _written(self, seen: Snapshot, then: Wanted) -> bool:
        keys = self.keys
        known = {key: kv.mod for key, kv in seen.kvs.items()}
        fence = tuple(Compare(k, "mod", known.get(k, 0)) for k in (keys.wanted, keys.outcome))
        put = Put(keys.wanted, encode(then)) if then != Wanted() else Delete(keys.wanted)
        return (await self._client.txn(Txn(fence, (put,)), self._timeout)).succeeded


# --- drain and undrain --------------------------------------------------------------------


async def _drain(job: Job, args: Namespace) -> dict[str, Any]:
    if args.self == bool(args.node):
        raise UsageError("which node? Give its name, or --self.\nSee elastic-etcd drain --help.")
    node = args.node or os.environ.get("PET_NODE_NAME") or options.this_node(os.environ)
    asked = Drain(node, args.deadline, by=_user(), at=_now())

    def change(view: View) -> Wanted:
        job.run_of(view)
        there = [m for m in view.members if m.node == node]
        if args.self and not there:
            raise ElasticEtcdError(f"this machine's node, {node}, is not in job {job.name}")
        limits = job.run_of(view).limits
        for member in (m for m in there if m.leaving and args.deadline is not None):
            stands = wanted.leave_deadline(view, member, limits)
            if stands != args.deadline:
                raise ElasticEtcdError(f"node {node} leaves already, its {stands:g} s stand")
        if args.self:
            return _with(view, [replace(asked, lease=hexed(m.lease)) for m in there])
        if (known := wanted.drained(view, node)) and args.deadline in (None, known.deadline):
            return view.wanted or Wanted()
        if not (there or known):
            raise ElasticEtcdError(f"job {job.name} has no node {node}{_meant(view, node)}")
        return _with(view, [asked])

    view, changed = await job.change(change)
    limits = job.run_of(view).limits
    leases = {m.lease for m in view.members if m.node == node}
    seconds = limits.leave_deadline if args.deadline is None else args.deadline
    if args.wait:
        late = seconds + UNKILLABLE + STOP_PATIENCE
        await job.wait(f"{node} is still there", lambda v: _gone(v, leases), late)
    told = "has left" if args.wait or not leases else f"is to leave within {seconds:g} s"
    if not changed:
        told += "; it was drained before"
    return {
        "node": node,
        "changed": changed,
        "deadline": seconds,
        "left": args.wait or not leases,
        "told": f"node {node} of job {job.name} {told}",
        "note": _too_few(view, node, limits),
    }


def _gone(view: View, leases: set[int]) -> bool:
    return leases.isdisjoint(m.lease for m in view.members)


def _too_few(view: View, node: str, limits: Limits) -> str:
    """What follows for the others, where they are too few."""
    left = [m for m in _staying(view) if m.node != node]
    if not left:
        return "no other node is there: the job ends as stopped"
    if limits.largest(len(left)):
        return ""
    least = f"{len(left)} of at least {limits.min_nodes} nodes are left"
    return f"{least}: training stops until more come, or ends after {limits.join_timeout:g} s"


def _staying(view: View) -> list[Member]:
    return [m for m in view.members if not (m.leaving or wanted.drained(view, m.node))]


def _meant(view: View, node: str) -> str:
    names = sorted({m.node for m in view.members})
    if near := get_close_matches(node, names, n=1):
        return f" (did you mean {near[0]}?)"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"; there are {', '.join(names[:8])}{more}" if names else "; nobody is there"


def _with(view: View, drains: list[Drain]) -> Wanted:
    """What is wanted with these, instead of others of the same node or member."""
    there = _pruned(view)
    same = {(d.node, d.lease) for d in drains}
    kept = [d for d in there.drains if (d.node, d.lease) not in same]
    if len(kept) + len(drains) > MOST_DRAINS:
        raise ElasticEtcdError(f"{len(kept)} nodes are drained, and no more can be: undrain some")
    return replace(there, drains=(*kept, *drains))


def _pruned(view: View) -> Wanted:
    """What is wanted, without what means nothing any more."""
    there = view.wanted or Wanted()
    members = {hexed(m.lease) for m in view.members}
    drains = tuple(d for d in there.drains if not d.lease or d.lease in members)
    run = view.spec.run if view.spec and not view.outcome else ""
    halt = there.stop if there.stop and there.stop.run == run else None
    return Wanted(drains, halt)


async def _undrain(job: Job, args: Namespace) -> dict[str, Any]:
    def change(view: View) -> Wanted:
        if not wanted.drained(view, args.node):
            names = sorted({d.node for d in _pruned(view).drains if not d.lease})
            drained = f"; drained are {', '.join(names)}" if names else ""
            raise ElasticEtcdError(f"node {args.node} of job {job.name} is not drained{drained}")
        if any(m.node == args.node for m in view.members):
            wait = "undrain it when it has left (drain --wait waits for that)"
            raise ElasticEtcdError(f"node {args.node} of job {job.name} is still leaving: {wait}")
        there = _pruned(view)
        return replace(there, drains=tuple(d for d in there.drains if d.node != args.node))

    await job.change(change)
    told = f"node {args.node} of job {job.name} may come back"
    return {"node": args.node, "changed": True, "told": told}


# --- stop ---------------------------------------------------------------------------------


async def _stop(job: Job, args: Namespace) -> dict[str, Any]:
    by, at = _user(), _now()

    def change(view: View) -> Wanted:
        run = job.run_of(view).run
        if wanted.halted(view, run):
            return view.wanted or Wanted()
        return replace(_pruned(view), stop=Halt(run, args.save, by, at))

    view, changed = await job.change(change)
    spec, state = job.run_of(view), ""
    if args.wait:
        leaving = [wanted.leave_deadline(view, m, spec.limits) for m in view.members]
        late = spec.limits.patience + max(leaving, default=0.0)
        ended = await job.wait("it goes on", lambda v: _ended(v, spec.run), late)
        state = ended.outcome.state if ended.outcome else "stopped"
    told = f"is over: {state}" if state else "is to stop"
    if not changed:
        told += "; it was to stop before"
    return {"changed": changed, "state": state or None, "told": f"job {job.name} {told}"}


def _ended(view: View, run: str) -> bool:
    """Whether it has an outcome, or nobody is left to write one."""
    return bool(view.outcome and view.outcome.run == run) or not view.members


def _user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no such user in this container
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


COMMANDS = {"drain": drain, "undrain": undrain, "stop": stop}
