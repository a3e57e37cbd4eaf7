"""What workers' logs must show: I3, I8, one world at a time, each sample once, the very weights."""

import json
import traceback
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tests.e2e.digits import PER_EPOCH, Uses, check_samples, same_bits, undisturbed
from tests.e2e.invariants import Event, check_worlds

from .history import World
from .trainer import Small


class Training:
    """The logs of a job of trainer.py that has ended, in `directory`."""

    def __init__(self, directory: Path, worlds: dict[int, World]) -> None:
        self.directory, self.worlds = directory, worlds
        self.events = [Event(**line) for path in directory.glob("*.jsonl") for line in _lines(path)]
        self.uses = [line for path in directory.glob("*.uses") for line in _lines(path)]
        self.steps = self.samples = self.again = 0
        times = sorted(e.time for e in self.events if e.event == "step")
        self.pause = max((b - a for a, b in pairwise(times)), default=0.0)

    def check(self) -> list[str]:
        """What is wrong."""
        checks = (
            lambda: check_worlds(self.events),
            self._as_etcd_says,
            self._one_world_at_a_time,
            self._no_stale_file,
            self._data,
        )
        return [text for check in checks if (text := _wrong(check))]

    def _as_etcd_says(self) -> None:
        """I8: each worker has the rank, the size and the master of its generation's final round."""
        for e in self.events:
            if e.event != "start":
                continue
            world = self.worlds.get(e.generation)
            assert world, f"I2: etcd knows no final round for {e}"
            sizes = [nproc for _, nproc in world.nodes]
            rank = sum(sizes[: e.group_rank]) + e.local_rank
            place = (world.nodes[e.group_rank][0], rank, world.size, world.master)
            assert place == (e.node, e.rank, e.world_size, e.master), f"I8: {e}, etcd has {world}"

    def _one_world_at_a_time(self) -> None:
        """A step that some rank has finished was begun by all before any later world began.

        What a frozen process logs when it wakes up is of steps that the others had begun long ago.
        """
        begun: dict[tuple[int, int], float] = defaultdict(float)
        for line in self.uses:
            if line["what"] == "use":
                step = line["generation"], line["step"]
                begun[step] = max(begun[step], line["time"])
        latest: dict[int, float] = defaultdict(float)
        for e in self.events:
            if e.event == "step":
                latest[e.generation] = max(latest[e.generation], begun[e.generation, e.step])
        first: dict[int, float] = {}
        for e in self.events:
            if e.event == "start":
                first[e.generation] = min(first.get(e.generation, e.time), e.time)
        for generation, last in latest.items():
            later = {g: t for g, t in first.items() if g > generation and t < last}
            assert not later, f"I3: generation {generation} trained on at {last}, begun: {later}"

    def _no_stale_file(self) -> None:
        """Section 7: a file is written only by the generation that is the job's when it asks."""
        for line in self.uses:
            if line["what"] == "saved":
                over = self.worlds[line["generation"]].claimed
                assert line["asked"] < over, f"a stale generation has written: {line}, over {over}"

    def _data(self) -> None:
        """Each sample once per epoch among the steps that count; the weights to the last bit."""
        uses = Uses(self.directory)
        kept = uses.kept()
        self.steps, self.samples = len(kept), sum(map(len, kept.values()))
        self.again = sum(uses.lost().values())
        if self.steps >= PER_EPOCH:  # else the user was very quick to stop it
            check_samples(uses)
        found = [torch.load(path) for path in self.directory.glob("*.weights")]
        assert found, "nobody has come to the end"
        for weights in found:
            same_bits(weights, found[0])
        same_bits(found[0], undisturbed(uses.end[0], Small()))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _wrong(check: Callable[[], object]) -> str:
    try:
        check()
    except (AssertionError, KeyError) as error:
        return "".join(traceback.format_exception(error, limit=-3)).strip()
    return ""
