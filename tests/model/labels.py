"""What transitions are called: for people who read a trace, and to say what a search reached."""

from elastic_etcd.core.lifecycle import MarkLeaving, ReportEnd, State
from tests.model.invariants import is_done, round_of
from tests.model.node import Node, owner
from tests.model.store import KEYS, Store


def described(state: State) -> str:
    """The write on its way: "claim", "report"."""
    what = state.pending.what if state.pending else MarkLeaving()
    if isinstance(what, MarkLeaving):
        return "mark of leaving"
    return "report" if isinstance(what, ReportEnd) else type(what).__name__.lower()


def done(ok: bool) -> str:
    return "written" if ok else "refused"


def relation(store: Store, node: Node) -> str:
    """What a node has to do with the round that is there: "in joinable, acked"."""
    now = round_of(store)
    if now is None:
        return ""
    role = ", coordinator" if now.coordinator == node.lease else ""
    acked = ", acked" if node.acked == now.generation and node.lease else ""
    return f" in {now.phase}{role}{acked}"


def instead(what: str, store: Store, node: Node) -> str:
    """Of a new coordinator, in whose place it leads: " instead of one lost in frozen"."""
    now = round_of(store)
    if what not in ("claim", "takeover"):
        return ""
    if now is None:
        other = store.lost is not None and store.lost[0] != node.number
        return f", instead of one lost in {store.lost[1]}" if store.lost and other else ""
    if owner(now.coordinator) == node.number:
        return ""
    value = store.value(KEYS.member(now.coordinator))
    went = "leaving" if value else "lost"
    if is_done(store, now.generation, now.coordinator):
        went = f"done and {went}"
    return f", instead of one {went} in {now.phase}"
