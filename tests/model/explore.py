"""Breadth-first over every interleaving; liveness by walking back from where it is good."""

import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.core.values import Spec
from tests.model.store import KEYS, Store
from tests.model.world import RUN, Faults, Node, System, fresh

T = TypeVar("T", bound=Hashable)
World: TypeAlias = tuple[int, tuple[int, ...], Faults]


@dataclass
class Result:
    """What a search saw; `trace` leads to the violation, when there is one."""

    states: int
    seconds: float
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = f"{self.states} states in {self.seconds:.1f} s"
        return "\n  ".join((told, self.violation, *self.trace)) if self.violation else told


@dataclass
class Numbers(Generic[T]):
    """Each distinct value once, by a small number."""

    values: list[T] = field(default_factory=list)
    known: dict[T, int] = field(default_factory=dict)

    def of(self, value: T) -> int:
        number = self.known.get(value)
        if number is None:
            number = self.known[value] = len(self.values)
            self.values.append(value)
        return number


class Search:
    """All worlds that `count` agents can reach under `faults`."""

    def __init__(self, system: System, count: int, faults: Faults) -> None:
        self.system = system
        self.stores: Numbers[Store] = Numbers()
        self.nodes: Numbers[Node] = Numbers()
        self.moves: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
        spec = Put(KEYS.spec, Spec(RUN, 1, 1).encode())
        store = Store().apply(Txn((), (spec,)))[0]
        first = tuple(self.nodes.of(fresh(i)) for i in range(count))
        self.worlds: list[World] = [(self.stores.of(store), first, faults)]
        self.came: list[tuple[int, int, str]] = [(-1, 0, "")]
        self.back: list[list[int]] = [[]]

    def run(self) -> Result:
        """Stop at the first violation, else look for worlds without a way on."""
        began = time.monotonic()
        violation, at = self._forward()
        if not violation:
            violation, at = self._stuck()
        seconds = time.monotonic() - began
        return Result(len(self.worlds), seconds, violation, self._trace(at) if violation else ())

    def _forward(self) -> tuple[str, int]:
        known = {self.worlds[0]: 0}
        for at, (store, nodes, faults) in enumerate(self.worlds):  # it grows under the loop
            for i, node in enumerate(nodes):
                try:
                    moves = self.moves.get((store, node)) or self._moves(store, node)
                except AssertionError as violation:  # also one in the rules themselves
                    return f"{violation} (node {i})", at
                for label, after, now, fault in moves:
                    left = faults
                    if fault >= 0:
                        if not faults[fault]:
                            continue
                        left = faults.without(fault)
                    world = (after, (*nodes[:i], now, *nodes[i + 1 :]), left)
                    number = known.get(world)
                    if number is None:
                        number = known[world] = len(self.worlds)
                        self.worlds.append(world)
                        self.came.append((at, i, label))
                        self.back.append([])
                    if fault < 0:
                        self.back[number].append(at)
        return "", -1

    def _moves(self, store: int, node: int) -> list[tuple[str, int, int, int]]:
        found = []
        for move in self.system.moves(self.stores.values[store], self.nodes.values[node]):
            if move.fault != "never":
                fault = Faults._fields.index(move.fault) if move.fault else -1
                to = (self.stores.of(move.store), self.nodes.of(move.node))
                found.append((move.label, *to, fault))
        self.moves[store, node] = found
        return found

    def _stuck(self) -> tuple[str, int]:
        """I6: from each world with enough live agents, calm steps reach a good one."""
        seen = bytearray(len(self.worlds))
        queue: deque[int] = deque()
        for at, (store, nodes, _) in enumerate(self.worlds):
            if self.system.good(self.stores.values[store], self._nodes(nodes)):
                seen[at] = 1
                queue.append(at)
        while queue:
            for before in self.back[queue.popleft()]:
                if not seen[before]:
                    seen[before] = 1
                    queue.append(before)
        for at, (_, nodes, _) in enumerate(self.worlds):
            if not seen[at] and self.system.able(self._nodes(nodes)):
                return "I6: no final world can be reached any more", at
        return "", -1

    def _nodes(self, numbers: tuple[int, ...]) -> tuple[Node, ...]:
        return tuple(self.nodes.values[n] for n in numbers)

    def _trace(self, at: int) -> tuple[str, ...]:
        trace = []
        while at > 0:
            at, node, label = self.came[at]
            trace.append(f"n{node} {label}")
        return tuple(reversed(trace))
