"""I1 to I9 of core/rules.py as checks on single steps; each raises Violation."""

from collections.abc import Sequence
from functools import cache

from elastic_etcd.core.lifecycle import Action, Event, StartWorkers, State, ViewChanged, Write
from elastic_etcd.core.rules import Close, Limits, Local, Verdict
from elastic_etcd.core.schema import Ledger, Outcome, Phase, Report, Round, decode, encode
from elastic_etcd.core.txn import Put, Txn
from tests.model.store import KEYS, Store

TOO_FEW = Verdict.TOO_FEW_NODES.exit_code


class Violation(AssertionError):
    """An invariant does not hold."""


@cache
def round_of(store: Store) -> Round | None:
    value = store.value(KEYS.round)
    return decode(Round, value) if value else None


def is_done(store: Store, generation: int, lease: int) -> bool:
    """Whether that member has reported that its workers of the generation exited 0."""
    report = store.value(KEYS.report(generation, lease))
    return report is not None and decode(Report, report, lease=lease, revision=0).done


def check_learned(name: str, state: State) -> None:
    """I2: an agent that knows its lease or generation to be gone is stopping its workers."""
    if not state.local.running or state.local.stopping or not state.alive:
        return
    now = state.view.round if state.view else None
    if not state.local.lease or now is None or now.generation != state.local.running:
        raise Violation(f"I2: {name} goes on with generation {state.local.running}")


def check_start(
    name: str, local: Local, acked: int, workers: int, begins: Round, store: Store
) -> None:
    """I2, I3, I8: when workers of the round `begins` are started."""
    if workers:
        raise Violation(f"I3: {name} starts {begins.generation} beside {workers}")
    if acked != begins.generation or begins.group_rank(local.lease) is None:
        raise Violation(f"I2: {name} starts {begins.generation} without its ack")
    if begins.phase is not Phase.FINAL or begins.master is None:
        raise Violation(f"I8: {name} starts on a round that is not final")
    generation, world = store.final
    if begins.generation > generation:
        raise Violation(f"I8: {name} starts on a world that never was")
    if begins.generation == generation and encode(begins) != world:
        raise Violation(f"I8: {name} starts on a world of its own")


def checked(name: str, lease: int, txn: Txn, before: Store, after: Store, limits: Limits) -> Store:
    """I1, I4, I5, I7, I8: after one write; the store with what is to be remembered."""
    if any(isinstance(op, Put) and op.key == KEYS.round for op in txn.then):
        _check_fence(name, lease, txn)
    was, now = round_of(before), round_of(after)
    value = after.value(KEYS.ledger)
    top = decode(Ledger, value).generation if value else before.top
    if top < before.top:
        raise Violation(f"I1: generation {before.top} is followed by {top}")
    after = after._replace(top=top)
    if now is None or now == was:
        return after
    if now.phase is Phase.SETUP:
        if now.generation <= before.top:
            raise Violation(f"I1: generation {now.generation} was handed out twice")
        after = after._replace(lost=None)
    if now.phase is Phase.FINAL:
        if now.generation <= before.final[0]:
            raise Violation(f"I1: generation {now.generation} has two final worlds")
        _check_world(now, limits)
        after = after._replace(final=(now.generation, encode(now)))
    if now.phase is Phase.CLOSED:
        _check_close(before, after, limits)
    return after


def check_alone(name: str, lease: int, before: Store) -> None:
    """I7: only the last member stops the job by leaving."""
    own = KEYS.member(lease)
    others = [k for k, *_ in before.kvs if k.startswith(KEYS.members) and k != own]
    if others:
        raise Violation(f"I7: {name} stops the job with {others} alive")


def check_budget(state: State, write: Write, limits: Limits) -> None:
    """I7: nobody gives up over failures that a long time of training has made good, nor over
    nodes that could not come.
    """
    if not isinstance(write.what, Close):
        return
    if write.what.outcome.exit_code == TOO_FEW and state.silent_since is not None:
        raise Violation("I7: the job is closed for want of nodes, which could not come")
    if write.what.outcome.failure is None:
        return
    assert state.view
    ledger, last = state.view.ledger, state.lasted
    seen = last.seconds if last.generation == ledger.final else 0.0
    if ledger.trained + seen >= limits.restart_window:
        raise Violation("I7: the job is closed though its failures are forgiven")


def check_format(before: State, event: Event, actions: Sequence[Action]) -> None:
    """I9: who has seen a newer format neither writes nor starts workers."""
    view = event.view if isinstance(event, ViewChanged) else before.view
    if view and view.newer and any(isinstance(a, Write | StartWorkers) for a in actions):
        raise Violation("I9: an agent writes into a job of a newer format")


def _check_fence(name: str, lease: int, txn: Txn) -> None:
    targets = {(c.key, c.target) for c in txn.compare}
    own = any(k.startswith(KEYS.members) and t == "create" for k, t in targets)
    if (KEYS.round, "mod") not in targets or not own:
        raise Violation(f"I5: {name} moves the round without a fence")
    if not lease:
        raise Violation(f"I5: {name} moves the round without a lease")


def _check_world(final: Round, limits: Limits) -> None:
    leases = [p.lease for p in final.participants]
    low, high = limits.min_nodes, limits.max_nodes
    if not low <= len(leases) <= high or len(set(leases)) != len(leases):
        raise Violation(f"I4: a world of {leases} where {low}..{high} are allowed")
    if final.master is None:
        raise Violation("I8: a final round without its master endpoint")


def _check_close(before: Store, after: Store, limits: Limits) -> None:
    """I7: a job is closed by all being done or by its budget, never by one node's end."""
    value, ledger_value = after.value(KEYS.outcome), before.value(KEYS.ledger)
    assert value and ledger_value
    outcome, ledger = decode(Outcome, value), decode(Ledger, ledger_value)
    done = ledger.group_ranks and all(
        is_done(before, ledger.final, lease) for lease in ledger.group_ranks
    )
    if outcome.state == "succeeded" and not done:
        raise Violation("I7: the job is closed though not every participant is done")
    if outcome.failure and ledger.restarts < limits.max_restarts:
        raise Violation("I7: the job is closed though restarts are left")
