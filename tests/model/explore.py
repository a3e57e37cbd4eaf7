"""Breadth-first over every interleaving; liveness by walking back from where it is good."""

import gc
import time
from collections import deque
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from elastic_etcd.core.schema import Limits, Spec, encode
from elastic_etcd.core.txn import Put, Txn
from tests.model.agent import RUN
from tests.model.goals import Goals
from tests.model.node import CALM, FREE, Faults, Node, Numbers
from tests.model.store import KEYS, Store
from tests.model.world import System

World: TypeAlias = tuple[int, ...]  # the numbers of a store and of each node


@dataclass
class Result:
    """What a search saw, in CPU seconds; `trace` leads to the violation, when there is one.

    `reached` has the labels of all transitions that were taken.
    """

    states: int
    transitions: int
    seconds: float
    violation: str
    trace: tuple[str, ...]
    reached: frozenset[str]

    def __str__(self) -> str:
        told = f"{self.states} states, {self.transitions} transitions in {self.seconds:.1f} s"
        return "\n  ".join((told, self.violation, *self.trace)) if self.violation else told


class Budgets:
    """What is left of `faults`, by number; a bit set stands for all that a budget includes.

    Whoever may do more can do all that others can: a world is explored again only with a
    budget that no earlier one included. Calm steps, and so liveness, do not depend on it.
    """

    def __init__(self, faults: Faults) -> None:
        self.all = [Faults(*left) for left in product(*(range(n, -1, -1) for n in faults))]
        number = {left: i for i, left in enumerate(self.all)}
        self.without = [
            [
                number.get(left._replace(**{name: often - 1}), -1)
                for name, often in left._asdict().items()
            ]
            for left in self.all
        ]
        self.includes = [
            sum(
                1 << i
                for i, less in enumerate(self.all)
                if all(a <= b for a, b in zip(less, left, strict=True))
            )
            for left in self.all
        ]


class Search:
    """All worlds that `count` agents can reach under `limits` and `faults`."""

    def __init__(self, limits: Limits, count: int, faults: Faults) -> None:
        self.system = System(limits, faults)
        self.goals = Goals(self.system)
        self.budgets = Budgets(faults)
        self.nodes: Numbers[Node] = Numbers()
        self.moves: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
        spec = Put(KEYS.spec, encode(Spec(RUN, Limits(1, 1))))
        store = self.system.stores.of(Store().apply(Txn((), (spec,)))[0])
        first = tuple(self.nodes.of(self.system.fresh(Node(i))) for i in range(count))
        self.worlds: list[World] = [(store, *first)]
        self.back: list[list[int]] = [[]]  # calm steps to each world
        self.queue = [(0, 0)]  # a world and the number of what is left of the faults
        self.came: list[tuple[int, int, str]] = [(-1, 0, "")]  # to each of these
        self.reached: set[str] = set()
        self.transitions = 0

    def run(self) -> Result:
        """Stop at the first violation, else look for worlds without a way on."""
        began = time.process_time()
        gc.disable()  # there are no cycles, and millions of tuples to look for them in
        try:
            violation, at = self._forward()
            if not violation:
                violation, at = self._stuck()
        finally:
            gc.enable()
        seconds = time.process_time() - began
        trace = self._trace(at) if violation else ()
        reached = frozenset(self.reached)
        return Result(len(self.worlds), self.transitions, seconds, violation, trace, reached)

    def _forward(self) -> tuple[str, int]:
        known = {self.worlds[0]: 0}
        covered = [self.budgets.includes[0]]
        without, includes = self.budgets.without, self.budgets.includes
        expanded = -1
        for at, (number, budget) in enumerate(self.queue):  # it grows under the loop
            world = self.worlds[number]
            calm, expanded = number > expanded, max(number, expanded)
            for i in range(1, len(world)):
                try:
                    moves = self.moves.get((world[0], world[i]))
                    if moves is None:
                        moves = self._moves(world[0], world[i])
                except AssertionError as violation:  # also one in the rules themselves
                    return f"{violation} (node {i - 1})", at
                for label, store, node, fault in moves:
                    left = budget if fault < 0 else without[budget][fault]
                    if left < 0:
                        continue
                    self.transitions += 1
                    self.reached.add(label)
                    to = (store, *world[1:i], node, *world[i + 1 :])
                    after = known.get(to)
                    if after is None:
                        after = known[to] = len(self.worlds)
                        self.worlds.append(to)
                        self.back.append([])
                        covered.append(0)
                    if calm and fault == -1:
                        self.back[after].append(number)
                    if covered[after] >> left & 1:
                        continue
                    covered[after] |= includes[left]
                    self.queue.append((after, left))
                    self.came.append((at, i - 1, label))
                    if self._overcounted(store, left):
                        return "I7: a failure is counted twice", len(self.queue) - 1
                    if self._goes_on_in_vain(store, left):
                        return "I7: restarts go on without progress", len(self.queue) - 1
        return "", -1

    def _moves(self, store: int, node: int) -> list[tuple[str, int, int, int]]:
        found = []
        for move in self.system.moves(store, self.nodes[node]):
            kinds = {CALM: -1, FREE: -2}
            fault = kinds[move.fault] if move.fault in kinds else Faults._fields.index(move.fault)
            found.append((move.label, move.store, self.nodes.of(move.node), fault))
        self.moves[store, node] = found
        return found

    def _overcounted(self, store: int, left: int) -> bool:
        at_first, now = self.budgets.all[0], self.budgets.all[left]
        happened = at_first.fail + at_first.peer - now.fail - now.peer
        happened += at_first.early - now.early + at_first.poison - now.poison
        return self.goals.counted(store) > happened

    def _goes_on_in_vain(self, store: int, left: int) -> bool:
        """Whether more restarts are used than other failures and --stop-after-no-progress allow."""
        at_first, now = self.budgets.all[0], self.budgets.all[left]
        others = at_first.fail + at_first.peer + at_first.early - now.fail - now.peer - now.early
        allowed = self.goals.limits.stop_after_no_progress + others
        return at_first.poison > 0 and self.goals.restarts(store) > allowed

    def _stuck(self) -> tuple[str, int]:
        """I6: from each world with enough live agents, calm steps reach a good one."""
        seen = bytearray(len(self.worlds))
        queue: deque[int] = deque()
        for at, (store, *nodes) in enumerate(self.worlds):
            if self.goals.good(store, self._nodes(nodes)):
                seen[at] = 1
                queue.append(at)
        while queue:
            for before in self.back[queue.popleft()]:
                if not seen[before]:
                    seen[before] = 1
                    queue.append(before)
        for at, (number, _) in enumerate(self.queue):
            store, *left = self.worlds[number]
            if not seen[number] and self.goals.able(store, self._nodes(left)):
                return "I6: no final world can be reached any more", at
        return "", -1

    def _nodes(self, numbers: "list[int] | tuple[int, ...]") -> tuple[Node, ...]:
        return tuple(self.nodes[n] for n in numbers)

    def _trace(self, at: int) -> tuple[str, ...]:
        trace = []
        while at > 0:
            at, node, label = self.came[at]
            trace.append(f"n{node} {label}")
        return tuple(reversed(trace))
