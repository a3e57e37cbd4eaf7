"""What the workers have logged so far, read as it grows: who trains now, and how far they are."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Seat:
    """A rank of a world: its process, and when it last finished a step (wall clock)."""

    node: str
    place: int  # group rank
    pid: int
    size: int
    last: float = 0.0


class Journal:
    """The worker logs in a directory; `read` takes in what is new."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._worlds: dict[int, dict[int, Seat]] = {}  # generation -> rank -> seat
        self.step = 0

    @property
    def generation(self) -> int:
        """The latest that workers have begun."""
        return max(self._worlds, default=0)

    @property
    def world(self) -> dict[int, Seat]:
        """Its ranks so far."""
        return self._worlds.get(self.generation, {})

    def read(self) -> None:
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole, newline, _ = new.rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole + newline)
            for line in whole.splitlines():
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        seats = self._worlds.setdefault(line["generation"], {})
        if line["event"] == "start":
            place, size = line["group_rank"], line["world_size"]
            seats[line["rank"]] = Seat(line["node"], place, line["pid"], size)
            for old in [g for g in self._worlds if g < self.generation - 3]:
                del self._worlds[old]
        elif line["event"] == "step" and line["rank"] in seats:
            seats[line["rank"]].last = line["time"]
            self.step = max(self.step, line["step"])

    def nodes(self) -> list[str]:
        """The world's nodes, in rank order."""
        places = {seat.place: seat.node for seat in self.world.values()}
        return [places[place] for place in sorted(places)]

    def pids(self, node: str) -> list[int]:
        """Its workers', in rank order."""
        return [seat.pid for _, seat in sorted(self.world.items()) if seat.node == node]

    def trains(self, since: float) -> bool:
        """Whether every rank of the latest world has finished a step after that moment."""
        seats = self.world.values()
        complete = bool(seats) and len(seats) == next(iter(seats)).size
        return complete and all(seat.last > since for seat in seats)
