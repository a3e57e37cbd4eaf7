"""What must hold when a job has ended: in etcd's history, in workers' logs, and on the machine.

What is wrong is returned, not raised, so that one violation does not hide the others.
"""

import json
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

import torch

from tests.support.digits import PER_EPOCH, Uses, check_samples, same_bits, undisturbed
from tests.support.etcd import EtcdServer
from tests.support.invariants import Event, check_together, check_worlds
from tests.support.job import Job
from tests.support.residue import keys, leases

from .history import Recorded
from .nodes import TTL, Nodes
from .workload import Small

PHASES = ("setup", "joinable", "frozen", "final", "closed")
SHARED = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
# Lines of an agent's own begin with its name, or are indented by four; a worker's begin with its
# node and rank in brackets, and by six where the agent has a worker's last words as the root cause.
OURS = re.compile(
    r"^(?!\[n\d+ | {6}).*"
    r"(Traceback \(most|Exception ignored|never retrieved|never awaited|Fatal Python)"
)
# A worker's, but what torch says of peers that are gone.
THEIRS = re.compile(r"^\[n\d+ .*(Fatal Python|Segmentation|AssertionError|File .*elastic_etcd/)")
# A fault of chaos, which may hit a worker while its process group starts threads.
NO_THREAD = re.compile(r"\n\[n\d+ .*(Resource temporarily unavailable|can't start new thread)")


# --- etcd's history


@dataclass(frozen=True)
class World:
    """A final round."""

    generation: int
    nodes: tuple[tuple[str, int], ...]  # name and number of workers, in rank order
    master: str
    claimed: float  # when the recorder saw the claim that ended it
    begins: float = float("inf")  # and when the next world's nodes were fixed
    leaving: frozenset[int] = frozenset()  # the ranks of nodes that have said that they leave

    @property
    def size(self) -> int:
        return sum(nproc for _, nproc in self.nodes)

    def may_write(self, rank: int) -> float:
        """Until when a rank may write files: one that leaves saves while the others wait for it."""
        return self.begins if rank in self.leaving else self.claimed


def _first_after(generation: int, seen: dict[int, float]) -> float:
    return min((at for g, at in seen.items() if g > generation), default=float("inf"))


@dataclass
class Replay:
    """A job's keys as they were after each Txn, and what was not as it must be."""

    minimum: int
    maximum: int
    wrong: list[str] = field(default_factory=list)
    finals: dict[int, dict[str, Any]] = field(default_factory=dict)
    claims: dict[int, float] = field(default_factory=dict)  # generation -> seen at
    freezes: dict[int, float] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)  # leases
    keys: dict[str, Recorded] = field(default_factory=dict)
    acks: dict[str, Recorded] = field(default_factory=dict)  # also of those that are gone
    round: dict[str, Any] = field(default_factory=dict)  # the last one, though it be deleted
    handed_out: int = 0
    halted: set[str] = field(default_factory=set)  # runs that somebody wanted to stop
    outcomes: dict[str, str] = field(default_factory=dict)  # of each run

    def worlds(self) -> dict[int, World]:
        """All final rounds, and when each was seen to be over."""
        found = {}
        for generation, final in self.finals.items():
            nodes = tuple((p["node"], p["nproc"]) for p in final["world"])
            master = f"{final['master']['addr']}:{final['master']['port']}"
            claimed = _first_after(generation, self.claims)
            begins = _first_after(generation, self.freezes)
            leaving = frozenset(
                p["first_rank"] + local_rank
                for p in final["world"]
                if p["lease"] in self.leaving
                for local_rank in range(p["nproc"])
            )
            found[generation] = World(generation, nodes, master, claimed, begins, leaving)
        return found

    def take(self, txn: list[Recorded]) -> None:
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
                if event.key.startswith("acks/"):
                    self.acks[event.key] = event

    def _put(
        self, event: Recorded, value: dict[str, Any], members: set[str], txn: list[Recorded]
    ) -> None:
        kind, *rest = event.key.split("/")
        match kind:
            case "members" if f"{event.lease:016x}" != rest[0]:
                self._say(event, "a member key that is bound to another lease")
            case "members" if value.get("leaving"):
                self.leaving.add(rest[0])
            case "round":
                self._round(event, value, members, txn)
            case "ledger":
                if value["generation"] < self.handed_out:
                    self._say(event, f"I1: generation {self.handed_out} was handed out before")
                self.handed_out = value["generation"]
            case "acks":
                self._ack(event, int(rest[0]), rest[1], members)
            case "reports" if value["failure"] and not value["victim"]:
                if int(rest[0]) != self.round.get("generation"):
                    self._say(event, "I5: a culprit's report of a world that was over")
            case "wanted" if value["stop"]:
                self.halted.add(value["stop"]["run"])
            case "outcome":
                self._outcome(event, value["run"], value["state"])

    def _outcome(self, event: Recorded, run: str, state: str) -> None:
        """One of each run: it has succeeded, or it was stopped and somebody wanted that."""
        if run in self.outcomes:
            self._say(event, f"I7: a second outcome of run {run}, which has {self.outcomes[run]}")
        if state != "succeeded" and (state != "stopped" or run not in self.halted):
            self._say(event, f"I7: run {run} has {state}")
        if "succeeded" in self.outcomes.values():
            self._say(event, "I7: another run after one that has succeeded")
        self.outcomes[run] = state

    def _round(
        self, event: Recorded, now: dict[str, Any], members: set[str], txn: list[Recorded]
    ) -> None:
        last, self.round = self.round, now
        generation, phase = now["generation"], now["phase"]
        if now["coordinator"] not in members:
            self._say(event, "I5: its coordinator's lease was gone")
        led_on = last and (last["generation"], last["phase"], phase) == (
            generation,
            "final",
            "final",
        )
        if led_on and now["coordinator"] != last["coordinator"]:
            self._take_over(event, now, last)
            return
        order = (generation, PHASES.index(phase))
        if last and order <= (last["generation"], PHASES.index(last["phase"])):
            was = f"generation {last['generation']} was {last['phase']}"
            self._say(event, f"I1: {phase} of generation {generation} when {was}: a stale write")
        if not last or generation != last["generation"]:
            self.claims[generation] = event.time
            with_it = [json.loads(e.value)["generation"] for e in txn if e.key == "ledger"]
            if phase != "setup" or with_it != [generation]:
                self._say(event, f"I5: a claim in phase {phase} with generation {with_it}")
        elif phase != "closed" and now["coordinator"] != last["coordinator"]:
            self._say(event, f"I5: coordinator was {last['coordinator']}")
        if phase not in ("setup", "joinable"):
            self.freezes.setdefault(generation, event.time)
        if phase == "final":
            self._world(event, now, txn)

    def _take_over(self, event: Recorded, now: dict[str, Any], last: dict[str, Any]) -> None:
        """The same final round, in the place of a coordinator that is gone or leaving."""
        if now | {name: last[name] for name in ("coordinator", "node")} != last:
            self._say(event, "I1: a second world of this generation")
        before = self.keys.get(f"members/{last['coordinator']}")
        if before and not json.loads(before.value).get("leaving"):
            self._say(event, "I1: its coordinator was still there")

    def _world(self, event: Recorded, now: dict[str, Any], txn: list[Recorded]) -> None:
        generation = now["generation"]
        pages = [json.loads(e.value) for e in txn if e.key.startswith("world/") and not e.deleted]
        if any(page["generation"] != generation for page in pages):
            self._say(event, "I8: pages of another generation")
        world = [participant for page in pages for participant in page["participants"]]
        world.sort(key=lambda participant: participant["group_rank"])
        leases = [p["lease"] for p in world]
        ranks = [(p["group_rank"], p["first_rank"]) for p in world]
        sizes = accumulate((p["nproc"] for p in world), initial=0)
        if ranks != list(zip(range(now["nodes"]), sizes, strict=False)):
            self._say(event, f"I8: ranks {ranks} of {now['nodes']} nodes")
        if not self.minimum <= len(leases) <= self.maximum or len(set(leases)) < len(leases):
            self._say(event, f"I4: participants {leases}")
        for lease in leases:
            # Its lease may have ended since the coordinator looked: the next world is without it.
            if f"acks/{generation}/{lease}" not in self.acks:
                self._say(event, f"I2: {lease} has not acked")
        if generation in self.finals:
            self._say(event, "I1: a second world of this generation")
        first = self.acks.get(f"acks/{generation}/{leases[0]}") if leases else None
        if first and json.loads(first.value)["master"] != now["master"]:
            self._say(event, "I8: the master is not where group rank 0 listens")
        self.finals[generation] = now | {"world": world}

    def _ack(self, event: Recorded, generation: int, lease: str, members: set[str]) -> None:
        if generation != self.round.get("generation"):
            self._say(event, f"I5: an ack in generation {self.round.get('generation')}")
        if lease not in members or f"{event.lease:016x}" != lease:
            self._say(event, "I5: an ack of a member that is gone")

    def _say(self, event: Recorded, what: str) -> None:
        value = event.value[:300]
        self.wrong.append(f"{what}\n  at revision {event.revision}: {event.key} = {value}")


def replay(events: Iterable[Recorded], minimum: int, maximum: int) -> Replay:
    """Go through a job's events."""
    replayed = Replay(minimum, maximum)
    for _, txn in groupby(events, key=lambda event: event.revision):
        replayed.take(list(txn))
    return replayed


# --- workers' logs


class Workload:
    """The logs of a job of workload.py that has ended, in `directory`."""

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
            lambda: check_together(check_worlds(self.events)),
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
        """A file is written only by the generation that is the job's when it asks, or leaves it."""
        for line in self.uses:
            if line["what"] == "saved":
                over = self.worlds[line["generation"]].may_write(line["rank"])
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


# --- what is left


def residue(nodes: Nodes, etcd: EtcdServer) -> list[str]:
    """All that is there and should not be, after the time that leases take to end."""
    found, job = [], nodes.job
    kinds: dict[str, Callable[[], list[str]]] = {
        "processes": job.processes,
        "keys": lambda: [k for k, value in keys(etcd, job.name).items() if not _stays(k, value)],
        "leases": lambda: sorted(leases(etcd)),
        "files": nodes.files,
        "shared memory": lambda: _shared(job),
    }
    for what, find in kinds.items():
        if remains := _in_the_end(find, 2 * TTL + 10):
            found.append(f"{what} left behind: {remains}")
    return found


def unrecorded(job: Job, etcd: EtcdServer, replayed: Replay) -> list[str]:
    """The keys that the recorded history ends with are those that etcd has."""
    now, then = keys(etcd, job.name), replayed.keys
    if now == {key: json.loads(event.value) for key, event in then.items()}:
        return []
    return [f"the recorded history ends with {sorted(then)}, etcd has {sorted(now)}"]


def tracebacks(directory: Path, *, plain: bool) -> list[str]:
    """Of each agent's log the first place where something of ours went wrong."""
    found = []
    for path in sorted(directory.glob("*.agent.log")):
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            theirs = not plain and THEIRS.search(line)
            excerpt = "\n".join(lines[max(0, number - 5) : number + 25])
            whole = "\n".join(lines[number : number + 60])  # of its traceback
            if OURS.search(line) or (theirs and not NO_THREAD.search(whole)):
                found.append(f"{path.name}, line {number + 1}:\n{excerpt}")
                break
    return found


def _stays(key: str, value: dict[str, Any]) -> bool:
    """That a run was to stop stands until somebody wants something else of the job."""
    stopped = key == "wanted" and value["stop"] and not (value["drains"] or value["scale"])
    return bool(stopped) or key == "outcome" or key.startswith("history/")


def _in_the_end(find: Callable[[], list[str]], seconds: float) -> list[str]:
    """What is found after so long, unless there is nothing before. Asking takes its time."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        continue
    return found


def _shared(job: Job) -> list[str]:
    """Segments that torch made: their names begin with torch_PID_."""
    pids = {str(event.pid) for event in job.events("start")}
    return [p.name for p in SHARED.glob("torch_*") if p.name.split("_")[1] in pids]
