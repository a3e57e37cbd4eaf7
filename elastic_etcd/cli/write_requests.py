"""People's requests to a job: to drain a node, to change the number of nodes, to end it.

All of them are in one key. A request is written if nobody else has changed that key since it was
read; this takes the right to read the job and to write that key. The rules that heed it are in
core/requests.py.
"""

from __future__ import annotations

import asyncio
import os
import random
from argparse import Namespace
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from elastic_etcd.cli import flag_values, parsers, query
from elastic_etcd.core import requests
from elastic_etcd.core.lifecycle import Outdated
from elastic_etcd.core.schema import (
    MOST_SCALED,
    Drain,
    Halt,
    Phase,
    Requests,
    Scale,
    Sizes,
    encode,
    hexed,
)
from elastic_etcd.core.txn import Compare, Delete, Put, Txn
from elastic_etcd.core.words import counted
from elastic_etcd.core.writes import older_format
from elastic_etcd.errors import ElasticEtcdError, NewerFormat, NotInTime
from elastic_etcd.etcd.mirror import first
from elastic_etcd.etcd.retry import now
from elastic_etcd.times import SCALE_PATIENCE, STOP_PATIENCE, UNKILLABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_etcd.core.schema import Limits, Member, Spec
    from elastic_etcd.core.txn import Snapshot
    from elastic_etcd.core.view import View
    from elastic_etcd.etcd.client import TxnResult

_PAUSE = 0.2  # seconds at most, until a key that others change, too, is read again


class SteeredJob(query.Job):
    """A job to which requests are written."""

    async def change(self, change: Callable[[View], Requests]) -> tuple[View, bool]:
        """Write what `change` makes of a view; gives that view with it, and whether it is new.

        `change` raises ElasticEtcdError where it makes no sense. Raises NotInTime when others
        change the key again and again.
        """
        end = now() + self.timeout
        unheard = None  # it may have been written, and the answer was lost
        while True:
            seen = await self.read()
            view = self.view_of(seen)
            if view.newer:
                raise NewerFormat(Outdated(view.newer).reason)
            if older := older_format(self.keys, seen):
                runs = f"job {self.name} is run by an older elastic_etcd (format {older})"
                raise ElasticEtcdError(f"{runs}, which could not read this: use its own command")
            there = view.wanted or Requests()
            if there == unheard:
                return view, True
            then = change(view)
            if then == there:
                return replace(view, wanted=then), False
            result = await self._try(seen, then)
            if result.succeeded:
                return replace(view, wanted=then), True
            unheard = then if result.ambiguous else unheard
            if now() > end:
                raise NotInTime(f"others change {self.keys.wanted} again and again: try later")
            await asyncio.sleep(random.uniform(0, _PAUSE))  # noqa: S311 - no secret

    async def wait(self, what: str, until: Callable[[View], bool], seconds: float) -> View:
        """The first view for which `until` holds. Raises NotInTime."""

        def fits(snapshot: Snapshot) -> View | None:
            view = self.view_of(snapshot)
            return view if until(view) else None

        try:
            async with asyncio.timeout(seconds):
                found = first(self.client, self.ranges, fits)
                return await query.while_silence_is_told(self.client, self.args, found)
        except asyncio.CancelledError:  # by Ctrl-C
            query.note(f"{what}; what was asked for stands")
            raise
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

    def limits_of(self, view: View) -> Limits:
        """The limits of the run that goes on. Raises ElasticEtcdError where there is none."""
        return requests.wanted_limits(view, self.run_of(view))

    async def _try(self, seen: Snapshot, then: Requests) -> TxnResult:
        keys = self.keys
        known = {key: kv.mod for key, kv in seen.kvs.items()}
        fence = tuple(Compare(k, "mod", known.get(k, 0)) for k in (keys.wanted, keys.outcome))
        put = Put(keys.wanted, encode(then)) if then != Requests() else Delete(keys.wanted)
        return await self.client.txn(Txn(fence, (put,)), self.timeout)


# --- drain and undrain --------------------------------------------------------------------


async def drain(job: SteeredJob, args: Namespace) -> dict[str, Any]:
    """Do what `elastic-etcd drain` asks for; gives the object that `--json` prints."""
    node = node_of(args)
    asked = Drain(node, args.deadline, by=query.user(), at=_timestamp())

    def change(view: View) -> Requests:
        job.run_of(view)
        there = [m for m in view.members if m.node == node]
        if args.self and not there:
            missing = f"this machine's node, {node}, is not in job {job.name}"
            raise ElasticEtcdError(f"{missing}{_meant(view, node)}")
        limits = job.limits_of(view)
        for member in (m for m in there if m.leaving and args.deadline is not None):
            stands = requests.leave_deadline(view, member, limits)
            if stands != args.deadline:
                raise ElasticEtcdError(f"node {node} leaves already, its {stands:g} s stand")
        if args.self:
            new = [m for m in there if not _stands(requests.drain_of(view, m), args)]
            own = [replace(asked, lease=hexed(m.lease)) for m in new]
            return _with(view, own) if own else view.wanted or Requests()
        if _stands(known := requests.drained(view, node), args):
            return view.wanted or Requests()
        if not (there or known):
            raise ElasticEtcdError(f"job {job.name} has no node {node}{_meant(view, node)}")
        _refuse(_too_few(view, node, limits), args)
        return _with(view, [asked])

    view, changed = await job.change(change)
    limits = job.limits_of(view)
    members = [m for m in view.members if m.node == node]
    leases = {m.lease for m in members}
    given = limits.leave_deadline if args.deadline is None else args.deadline
    stand = (requests.leave_deadline(view, m, limits) for m in members)
    seconds = max(stand, default=given)

    def gone(view: View) -> bool:
        return leases.isdisjoint(m.lease for m in view.members)

    if args.wait:
        late = seconds + UNKILLABLE + STOP_PATIENCE
        await job.wait(f"{node} is still there", gone, late)
    state = "has left" if args.wait or not leases else f"is to leave within {seconds:g} s"
    if not changed:
        state += "; it was drained before"
    return {
        "node": node,
        "changed": changed,
        "deadline": seconds,
        "left": args.wait or not leases,
        "told": f"node {node} of job {job.name} {state}",
    }


def _stands(known: Drain | None, args: Namespace) -> bool:
    """Whether this drain is the one that is asked for."""
    return known is not None and args.deadline in (None, known.deadline)


def _too_few(view: View, node: str, limits: Limits) -> str:
    """Says what happens where too few other nodes are left, else ""."""
    left = [m for m in _staying(view) if m.node != node]
    if not left:
        return "no other node would be left: the job would end as stopped"
    if limits.largest(len(left)):
        return ""
    would = f"{counted(len(left), 'node')} would be left, at least {limits.min_nodes} are needed"
    ends = f"or end after {limits.join_timeout:g} s"
    return f"{would}: training would stop until more come, {ends}"


def _staying(view: View) -> list[Member]:
    return [m for m in view.members if not (m.leaving or requests.drained(view, m.node))]


def _meant(view: View, node: str) -> str:
    names = sorted({m.node for m in view.members})
    if near := get_close_matches(node, names, n=1):
        return f" (did you mean {near[0]}?)"
    return f"; there are {query.some_of(names)}" if names else "; nobody is there"


def _with(view: View, drains: list[Drain]) -> Requests:
    """The requests with these drains, instead of others of the same node or member."""
    there = _pruned(view)
    if (asked := requests.with_drains(there, drains)) is None:
        few = f"{len(there.drains)} nodes are drained, and no more can be"
        raise ElasticEtcdError(f"{few}: undrain some")
    return asked


def _pruned(view: View) -> Requests:
    """The requests that still mean anything."""
    there = view.wanted or Requests()
    members = {hexed(m.lease) for m in view.members}
    drains = tuple(d for d in there.drains if not d.lease or d.lease in members)
    run = view.spec.run if view.spec and not view.outcome else ""
    halt = there.stop if there.stop and there.stop.run == run else None
    scale = there.scale if there.scale and there.scale.run == run else None
    return Requests(drains, halt, scale)


async def undrain(job: SteeredJob, args: Namespace) -> dict[str, Any]:
    """Do what `elastic-etcd undrain` asks for; gives the object that `--json` prints."""

    def change(view: View) -> Requests:
        if not requests.drained(view, args.node):
            names = sorted({d.node for d in _pruned(view).drains if not d.lease})
            drained = f"; drained are {', '.join(names)}" if names else ""
            raise ElasticEtcdError(f"node {args.node} of job {job.name} is not drained{drained}")
        if any(m.node == args.node for m in view.members):
            wait = "undrain it when it has left (drain --wait waits for that)"
            raise ElasticEtcdError(f"node {args.node} of job {job.name} is still leaving: {wait}")
        there = _pruned(view)
        return replace(there, drains=tuple(d for d in there.drains if d.node != args.node))

    await job.change(change)
    text = f"node {args.node} of job {job.name} may come back"
    return {"node": args.node, "changed": True, "told": text}


# --- scale and stop -----------------------------------------------------------------------


async def scale(job: SteeredJob, args: Namespace) -> dict[str, Any]:
    """Do what `elastic-etcd scale` asks for; gives the object that `--json` prints."""
    asked = flag_values.in_multiples(args.nnodes, args.nodes_multiple_of)
    by, at = query.user(), _timestamp()

    def change(view: View) -> Requests:
        spec = job.run_of(view)
        there, own = _pruned(view), spec.limits
        if own.max_nodes == 1:
            meets = "its agent meets no others (--nnodes 1)"
            raise ElasticEtcdError(f"job {job.name} can't be scaled: {meets}")
        if asked.max_nodes > (most := own.pages * MOST_SCALED):
            begun = f"--nnodes {own.nnodes}, which can be scaled to {most} nodes"
            raise ElasticEtcdError(f"job {job.name} was begun with {begun}")
        if requests.wanted_limits(view, spec).nnodes == asked.nnodes:
            return view.wanted or Requests()
        _refuse(_fewer(view, asked), args)
        sizes = {name: getattr(asked, name) for name in Sizes.__struct_fields__}
        scale = Scale(**sizes, run=spec.run, instead_of=own.nnodes, by=by, at=at)
        return replace(there, scale=None if asked.nnodes == own.nnodes else scale)

    view, changed = await job.change(change)
    if args.wait:
        late = job.run_of(view).limits.patience + SCALE_PATIENCE
        await job.wait(f"no world of {asked.nnodes} trains", lambda v: _fits(v, asked), late)
    return {
        "nnodes": asked.nnodes,
        "changed": changed,
        "nodes": len(_staying(view)),
        "told": f"job {job.name} {'trains' if args.wait else 'is to train'} on {asked.nnodes} nodes"
        + ("" if changed else "; it was scaled so before"),
    }


def _fewer(view: View, asked: Limits) -> str:
    """Says what happens where too few nodes are there for such a world, else ""."""
    there = len(_staying(view))
    few = f"{counted(there, 'node is', 'nodes are')} there, at least {asked.min_nodes} are needed"
    return "" if asked.largest(there) else f"{few}: training would stop until more come"


def _refuse(why: str, args: Namespace) -> None:
    """Raises ElasticEtcdError where training would stop, and nobody has said that it may."""
    if why and not args.force:
        raise ElasticEtcdError(f"refused: {why}\nGive --force if that is meant.")


def _fits(view: View, asked: Limits) -> bool:
    """Whether a world trains that has an allowed number of nodes."""
    now = view.round
    return now is not None and now.phase is Phase.FINAL and asked.largest(now.nodes) == now.nodes


async def stop(job: SteeredJob, args: Namespace) -> dict[str, Any]:
    """Do what `elastic-etcd stop` asks for; gives the object that `--json` prints."""
    by, at = query.user(), _timestamp()

    def change(view: View) -> Requests:
        run = job.run_of(view).run
        if not view.members:
            again = "agents that are started again go on with it, forget --force removes it"
            raise ElasticEtcdError(
                f"job {job.name} is deserted, nobody is there to stop it: {again}"
            )
        if requests.halted(view, run):
            return view.wanted or Requests()
        return replace(_pruned(view), stop=Halt(run, args.save, by, at))

    view, changed = await job.change(change)
    spec, state = job.run_of(view), ""
    if args.wait:
        leaving = [requests.leave_deadline(view, m, spec.limits) for m in view.members]
        late = spec.limits.patience + max(leaving, default=0.0)
        await job.wait("it goes on", lambda v: _is_over(v, spec.run) or not v.members, late)
        gone = "no node is there, and nobody has said that it is over"
        ended = await job.wait(gone, lambda v: _is_over(v, spec.run), STOP_PATIENCE)
        state = ended.outcome.state if ended.outcome else "stopped"
    text = f"job {job.name} is over: {state}" if state else f"job {job.name} is to stop"
    if not changed:
        text += "; it was to stop before"
    return {"changed": changed, "state": state or None, "told": text}


async def forget(job: SteeredJob, args: Namespace) -> dict[str, Any]:
    """Do what `elastic-etcd forget` asks for; gives the object that `--json` prints."""
    seen = await job.read()
    view, keys = job.view_of(seen), job.keys
    if view.newer:
        raise NewerFormat(Outdated(view.newer).reason)
    if view.members:
        there = query.some_of(sorted(m.node for m in view.members))
        raise ElasticEtcdError(f"job {job.name} has nodes: {there}. Stop it, and wait for its end")
    if view.outcome is None and not args.force:
        left = "agents that are started again go on with it"
        raise ElasticEtcdError(f"job {job.name} is deserted, not over: {left}; or give --force")
    mod = seen.kvs[keys.outcome].mod if view.outcome else 0
    nobody = Compare(keys.members, "create", 0, prefix=True)
    fence = (nobody, Compare(keys.outcome, "mod", mod))
    removal = Txn(fence, (Delete(f"{keys.root}/", prefix=True),), job.ranges)
    result = await job.client.txn(removal, job.timeout)
    gone = result.ambiguous and not any(result.gets)  # removed by an attempt without an answer
    if not (result.succeeded or gone):
        raise NotInTime(f"job {job.name} has just changed, and is as it was: look again")
    return {"changed": True, "told": f"job {job.name} is forgotten"}


def _is_over(view: View, run: str) -> bool:
    return bool(view.outcome and view.outcome.run == run)


def node_of(args: Namespace) -> str:
    """The node that is meant."""
    given: str | None = args.node or os.environ.get("PET_NODE_NAME")
    return given or parsers.this_node(os.environ)


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


async def ask(job: SteeredJob, command: str, node: str) -> str:
    """Drain or undrain a node; gives the outcome in a line."""
    args = Namespace(node=node, deadline=None, wait=False, force=False)
    args.self = False
    try:
        return str((await {"drain": drain, "undrain": undrain}[command](job, args))["told"])
    except ElasticEtcdError as error:
        return f"error: {error}"
