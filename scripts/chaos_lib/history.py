"""What etcd's own history must show: I1, I2, I4, I5 of design, from every event of a job.

The events are replayed one Txn after the other. What is wrong is returned, not raised, so that
one violation does not hide the others.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

PHASES = ("setup", "joinable", "frozen", "final", "closed")


@dataclass(frozen=True)
class Event:
    """A line of recorder.py."""

    time: float
    revision: int
    deleted: bool
    key: str
    value: str
    version: int
    lease: int


@dataclass(frozen=True)
class World:
    """A final round."""

    generation: int
    nodes: tuple[tuple[str, int], ...]  # name and number of workers, in rank order
    master: str
    claimed: float  # when the recorder saw the claim that ended it

    @property
    def size(self) -> int:
        return sum(nproc for _, nproc in self.nodes)


@dataclass
class Replay:
    """A job's keys as they were after each Txn, and what was not as it must be."""

    minimum: int
    maximum: int
    wrong: list[str] = field(default_factory=list)
    finals: dict[int, dict[str, Any]] = field(default_factory=dict)
    claims: dict[int, float] = field(default_factory=dict)  # generation -> seen at
    keys: dict[str, Event] = field(default_factory=dict)
    round: dict[str, Any] = field(default_factory=dict)  # the last one, though it be deleted
    handed_out: int = 0
    outcomes: int = 0

    def worlds(self) -> dict[int, World]:
        """All final rounds, and when each was seen to be over."""
        found = {}
        for generation, final in self.finals.items():
            later = [seen for g, seen in self.claims.items() if g > generation]
            nodes = tuple((p["node"], p["nproc"]) for p in final["participants"])
            master = f"{final['master']['addr']}:{final['master']['port']}"
            over = min(later, default=float("inf"))
            found[generation] = World(generation, nodes, master, over)
        return found

    def take(self, txn: list[Event]) -> None:
        """All events of one revision."""
        for event in txn:
            before = self.keys.get(event.key)
            version = before.version + 1 if before else 1
            if not event.deleted and event.version != version:
                self._say(event, f"version {event.version} instead of {version}: events missed")
        members = {k.split("/")[1] for k in self.keys if k.startswith("members/")}
        for event in txn:
            if not event.deleted:
                self._put(event, json.loads(event.value), members, txn)
        for event in txn:
            if event.deleted:
                self.keys.pop(event.key, None)
            else:
                self.keys[event.key] = event

    def _put(
        self, event: Event, value: dict[str, Any], members: set[str], txn: list[Event]
    ) -> None:
        kind, *rest = event.key.split("/")
        match kind:
            case "members" if f"{event.lease:016x}" != rest[0]:
                self._say(event, "a member key that is bound to another lease")
            case "round":
                self._round(event, value, members, txn)
            case "generation":
                if value["generation"] < self.handed_out:
                    self._say(event, f"I1: generation {self.handed_out} was handed out before")
                self.handed_out = value["generation"]
            case "acks":
                self._ack(event, int(rest[0]), rest[1], members)
            case "reports" if value["failure"] and not value["victim"]:
                if int(rest[0]) != self.round.get("generation"):
                    self._say(event, "I5: a culprit's report of a world that was over")
            case "outcome":
                self.outcomes += 1
                if self.outcomes > 1 or value["state"] != "succeeded":
                    self._say(event, f"I7: outcome {self.outcomes} is {value}")

    def _round(
        self, event: Event, now: dict[str, Any], members: set[str], txn: list[Event]
    ) -> None:
        last, self.round = self.round, now
        generation, phase = now["generation"], now["phase"]
        order = (generation, PHASES.index(phase))
        if last and order <= (last["generation"], PHASES.index(last["phase"])):
            was = f"generation {last['generation']} was {last['phase']}"
            self._say(event, f"I1: {phase} of generation {generation} when {was}: a stale write")
        if now["coordinator"] not in members:
            self._say(event, "I5: its coordinator's lease was gone")
        if not last or generation != last["generation"]:
            self.claims[generation] = event.time
            with_it = [json.loads(e.value)["generation"] for e in txn if e.key == "generation"]
            if phase != "setup" or with_it != [generation]:
                self._say(event, f"I5: a claim in phase {phase} with generation {with_it}")
        elif phase != "closed" and now["coordinator"] != last["coordinator"]:
            self._say(event, f"I5: coordinator was {last['coordinator']}")
        if phase in ("frozen", "final"):
            self._world(event, now, last)

    def _world(self, event: Event, now: dict[str, Any], last: dict[str, Any]) -> None:
        generation, participants = now["generation"], now["participants"]
        leases = [p["lease"] for p in participants]
        if not self.minimum <= len(leases) <= self.maximum or len(set(leases)) < len(leases):
            self._say(event, f"I4: participants {leases}")
        for lease in leases:
            if f"acks/{generation}/{lease}" not in self.keys:
                self._say(event, f"I2: {lease} has not acked, or its lease is gone")
        if now["phase"] == "final":
            if participants != last.get("participants"):
                self._say(event, "I8: other participants than when it was frozen")
            if generation in self.finals:
                self._say(event, "I1: a second world of this generation")
            first = self.keys.get(f"acks/{generation}/{leases[0]}")
            if first and json.loads(first.value)["master"] != now["master"]:
                self._say(event, "I8: the master is not where group rank 0 listens")
            self.finals[generation] = now

    def _ack(self, event: Event, generation: int, lease: str, members: set[str]) -> None:
        if generation != self.round.get("generation"):
            self._say(event, f"I5: an ack in generation {self.round.get('generation')}")
        if lease not in members or f"{event.lease:016x}" != lease:
            self._say(event, "I5: an ack of a member that is gone")

    def _say(self, event: Event, what: str) -> None:
        value = event.value[:300]
        self.wrong.append(f"{what}\n  at revision {event.revision}: {event.key} = {value}")


def read(path: Path, root: str) -> Iterator[Event]:
    """The recorded events of the job whose keys are under `root`, without that."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n") and (fields := json.loads(line))["key"].startswith(root):
                yield Event(**fields | {"key": fields["key"].removeprefix(root)})


def replay(events: Iterable[Event], minimum: int, maximum: int) -> Replay:
    """Go through a job's events."""
    replayed = Replay(minimum, maximum)
    for _, txn in groupby(events, key=lambda event: event.revision):
        replayed.take(list(txn))
    return replayed
