"""How an agent joins its job: what it reads, and the Txn by which it becomes a member.

The same Txn begins a run, where there is none to join.
"""

from dataclasses import replace

from elastic_etcd.core.keys import Keys
from elastic_etcd.core.txn import Compare, Delete, Get, Put, Snapshot, Txn
from elastic_etcd.core.values import Ledger, Member, Spec
from elastic_etcd.core.view import EVERYTHING, View, view_of


def look(keys: Keys) -> tuple[Get, ...]:
    """What an agent reads before it joins."""
    members = Get(keys.members, prefix=True)
    return (Get(keys.spec), Get(keys.outcome), Get(keys.generation), members)


def join(
    keys: Keys, seen: Snapshot, member: Member, spec: Spec, *, again: bool, last: int = 0
) -> Txn | str:
    """The Txn by which `member` joins its job, or why it can't.

    A run goes on until it has an outcome: a node that comes back joins the run it was in, and
    `again` says that it was in run `spec.run`, up to generation `last`. After an outcome, or
    when nobody lives of a run with other limits, `spec` begins a new run (pytorch/elastic#151).
    Where nothing is left at all (etcd was wiped) the run it was in begins anew. Generations keep
    growing over runs, so that no key of an old run is ever mistaken for one of the new.
    """
    view = view_of(seen, keys, EVERYTHING)
    known = view.spec
    spoilt = known is None and keys.spec in seen.kvs and not view.outcome
    if spoilt and view.members:  # the members know which run it is, and go on with it
        known = replace(spec, run=view.members[0].run)
    if again and (view.outcome or (known and known.run != spec.run)):
        return "the job ended while this node was cut off"
    fresh = known is None or view.outcome is not None
    if known and not fresh and _nodes(known) != _nodes(spec):
        if view.members:
            return f"--nnodes {_nodes(spec)} differs from {_nodes(known)} of the nodes there"
        fresh = True
    run = spec.run if known is None or fresh else known.run
    fence = (
        Compare(keys.member(member.lease), "create", 0),
        Compare(keys.spec, "mod", _mod(seen, keys.spec)),
        Compare(keys.outcome, "mod", _mod(seen, keys.outcome)),
    )
    joined = replace(member, run=run, joined=view.ledger.generation)
    then = Put(keys.member(member.lease), joined.encode(), member.lease)
    if known and spoilt:
        return Txn(fence, (then, Put(keys.spec, known.encode())))
    return Txn(fence, (then, *(_begin(keys, view, spec, last) if fresh else ())))


def _orphans(keys: Keys, view: View) -> tuple[Delete, ...]:
    """The keys of members whose spec was removed by hand: without them they join again.

    Their fence is on the spec that is gone, so they could claim nothing (128 operations a Txn).
    """
    orphaned = view.spec is None and view.outcome is None
    return tuple(Delete(keys.member(m.lease)) for m in view.members[:100] if orphaned)


def _begin(keys: Keys, view: View, spec: Spec, last: int) -> tuple[Put | Delete, ...]:
    last = max(last, view.ledger.generation, view.outcome.generation if view.outcome else 0)
    return (
        Put(keys.spec, spec.encode()),
        Put(keys.generation, Ledger(generation=last).encode()),
        Delete(keys.round),
        Delete(keys.outcome),
        Delete(keys.reports(), prefix=True),
        *_orphans(keys, view),
    )


def _nodes(spec: Spec) -> str:
    return f"{spec.min_nodes}:{spec.max_nodes}"


def _mod(seen: Snapshot, key: str) -> int:
    kv = seen.kvs.get(key)
    return kv.mod if kv else 0
