"""What workers' logs must show, whatever happened to them."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """A line of a worker's log; trainers/ddp.py says what is in it."""

    event: str
    time: float
    generation: int
    rank: int
    world_size: int
    local_rank: int
    group_rank: int
    node: str
    pid: int
    restarts: int
    master: str
    step: int = 0
    loss: float = 0.0
    agent: int = 0
    born: int = 0
    overlap: list[int] = field(default_factory=list)


def check(events: Iterable[Event]) -> None:
    """I3 and I8 of core/rules.py, ranks 0..n-1, and that the training went on."""
    by_generation = check_worlds(events)
    check_together(by_generation)
    _goes_on([by_generation[g] for g in sorted(by_generation)])


def check_worlds(events: Iterable[Event]) -> dict[int, list[Event]]:
    """The same of workers that do not train together; gives the events by generation."""
    events = list(events)
    by_generation: dict[int, list[Event]] = defaultdict(list)
    for e in events:
        by_generation[e.generation].append(e)
    _one_generation_at_a_time(events)
    for generation, its_events in by_generation.items():
        _one_world(generation, its_events)
    return by_generation


def check_together(by_generation: dict[int, list[Event]]) -> None:
    """Workers that train together take a step when all of their world have started."""
    for generation, events in by_generation.items():
        if any(e.event == "step" for e in events):
            starts = [e for e in events if e.event == "start"]
            ranks = sorted(e.rank for e in starts)
            assert ranks == list(range(starts[0].world_size)), f"generation {generation}: {ranks}"


def _one_generation_at_a_time(events: list[Event]) -> None:
    """I3: no two generations have live workers of the same node at the same time."""
    overlaps = [e for e in events if e.overlap]
    assert not overlaps, f"workers of older generations were alive: {overlaps}"
    spans: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for e in events:
        spans[e.node][e.generation].append(e.time)
    for node, generations in spans.items():
        for earlier, later in pairwise(sorted(generations)):
            last, first = max(generations[earlier]), min(generations[later])
            assert last <= first, f"{node}: {earlier} lived {last - first:.3f} s into {later}"


def _one_world(generation: int, events: list[Event]) -> None:
    """I8: one world per generation; and its ranks are 0..n-1, each of one process."""
    worlds = {(e.world_size, e.master, e.restarts) for e in events}
    assert len(worlds) == 1, f"generation {generation} has several worlds: {worlds}"
    starts = [e for e in events if e.event == "start"]
    ranks = sorted(e.rank for e in starts)
    assert len(set(ranks)) == len(ranks), f"generation {generation}: ranks {ranks}"
    world_size = starts[0].world_size
    assert set(ranks) <= set(range(world_size)), f"generation {generation}: ranks {ranks}"
    places = {(e.node, e.group_rank) for e in starts}
    assert len({n for n, _ in places}) == len({g for _, g in places}) == len(places), places


def _goes_on(generations: list[list[Event]]) -> None:
    """Each process counts on by one; each generation begins where the one before it stopped."""
    done = 0
    for events in generations:
        steps: dict[int, list[int]] = defaultdict(list)
        for e in events:
            if e.event == "step":
                steps[e.pid].append(e.step)
        for pid, counted in steps.items():
            assert counted == list(range(counted[0], counted[0] + len(counted))), (pid, counted)
            # The last step may have been logged by others than rank 0, and not saved.
            assert done <= counted[0] <= done + 1, (events[0].generation, counted[0], done)
        done = max((counted[-1] for counted in steps.values()), default=done)


def samples(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """What each step of trainers/elastic.py used in the end: what was rolled back is void."""
    lines = [
        json.loads(line)
        for path in directory.glob("*.samples")
        for line in path.read_text().splitlines()
    ]
    last: dict[int, int] = defaultdict(int)
    for line in lines:
        last[line["step"]] = max(last[line["step"]], line["generation"])
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["generation"] == last[line["step"]]:
            steps[line["step"]].append(line)
    return steps


def each_sample_once(directory: Path, length: int = 240) -> None:
    """In every epoch but the last, which may have been stopped in the middle."""
    used: dict[int, list[int]] = defaultdict(list)
    for lines in samples(directory).values():
        for line in lines:
            used[line["epoch"]] += line["indices"]
    assert used
    for epoch, indices in used.items():
        assert len(set(indices)) == len(indices), f"epoch {epoch} repeats samples"
        if epoch != max(used):
            assert sorted(indices) == list(range(length)), f"epoch {epoch} lacks samples"
