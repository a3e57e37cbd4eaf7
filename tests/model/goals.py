"""What is asked of whole worlds, whatever led to them."""

from functools import cache

from elastic_etcd.core.lifecycle import Finished
from elastic_etcd.core.rules import Verdict
from elastic_etcd.core.schema import Ledger, Outcome, Phase, decode
from tests.model.invariants import (
    asked,
    is_done,
    is_drained,
    round_of,
    sizes,
    wanted_of,
    world_of,
)
from tests.model.node import Node
from tests.model.store import EARLY, KEYS, NEWER
from tests.model.world import System


class Goals:
    """Questions about worlds of `system`."""

    def __init__(self, system: System) -> None:
        self.limits, self.stores, self.agent = system.limits, system.stores, system.agent
        self.final = cache(self._final)
        self.counted = cache(self._counted)
        self.restarts = cache(self._restarts)
        self.open = cache(self._open)

    def good(self, store: int, nodes: tuple[Node, ...]) -> bool:
        """What liveness must reach: a final world that trains, or the end of the job.

        Who waits is in it if that makes a larger one and no participant is done.
        In a job of a newer format it is the end of all agents.
        """
        generation, awaited = self.final(store)
        if generation < 0:
            return not any(node.state for node in nodes)
        if not generation:
            return not awaited
        up = {n.lease for n in nodes if n.workers == generation or self._finished(n, generation)}
        if not awaited <= up | {n.lease for n in nodes if n.hung}:
            return False
        world = self.open(store)
        if world is None:
            return True
        there = world | {n.lease for n in self._able(store, nodes)}
        allowed = sizes(asked(wanted_of(self.stores[store]), self.limits))
        larger = any(len(world) < size <= len(there) for size in allowed)
        return len(world) in allowed and not larger

    def _finished(self, node: Node, generation: int) -> bool:
        state = self.agent.states[node.state] if node.state else None
        if state is None or state.local.ran != generation:
            return False
        return isinstance(state.result, Finished)

    def _final(self, number: int) -> tuple[int, frozenset[int]]:
        """Whose workers the final world of this store awaits: (0, {}) after the end, (0, {0})
        without a final world; -1 for a job of a newer format."""
        store = self.stores[number]
        if (outcome := store.value(KEYS.outcome)) is not None:
            return -1 if outcome == NEWER else 0, frozenset()
        now = round_of(store)
        if now is None or now.phase is not Phase.FINAL or wanted_of(store).stop:
            return 0, frozenset({0})
        leases = {p.lease for p in world_of(store)}
        done = {lease for lease in leases if is_done(store, now.generation, lease)}
        able = leases - done - {*store.hung}
        if any(p.lease in able and is_drained(store, p.node) for p in world_of(store)):
            return 0, frozenset({0})
        return now.generation, frozenset(leases - done)

    def able(self, store: int, nodes: tuple[Node, ...]) -> bool:
        """Whether min agents are alive, so that liveness asks for a final world.

        In a job that is to stop it asks one for its end.
        """
        if wanted_of(self.stores[store]).stop:
            return any(n.state and n.lease and not n.hung for n in nodes)
        least = asked(wanted_of(self.stores[store]), self.limits).min_nodes
        return len(self._able(store, nodes)) >= least

    def _able(self, store: int, nodes: tuple[Node, ...]) -> list[Node]:
        """The nodes that could train."""
        there = [n for n in nodes if n.state and not n.hung]
        alive = [n for n in there if not is_drained(self.stores[store], n.name)]
        return [n for n in alive if not self.agent.states[n.state].local.leaving]

    def _open(self, number: int) -> frozenset[int] | None:
        """The leases in the final world, None if there is none or it begins to finish."""
        store = self.stores[number]
        now = round_of(store)
        if now is None:
            return None
        leases = frozenset(p.lease for p in world_of(store))
        return None if any(is_done(store, now.generation, lease) for lease in leases) else leases

    def _counted(self, number: int) -> int:
        """How many failures the job has counted, at least; giving up takes one more."""
        store = self.stores[number]
        value = store.value(KEYS.outcome)
        if value and value != NEWER and (failure := (outcome := decode(Outcome, value)).failure):
            if outcome.exit_code == Verdict.NO_PROGRESS.exit_code:
                return self.limits.stop_after_no_progress + 1
            return 2 if failure.message == EARLY else self.limits.max_restarts + 1
        return self.restarts(number)

    def _restarts(self, number: int) -> int:
        """How many restarts are used."""
        store = self.stores[number]
        now, value = round_of(store), store.value(KEYS.ledger)
        ledger = decode(Ledger, value) if value else Ledger()
        return max(ledger.restarts, now.restarts if now else 0)
