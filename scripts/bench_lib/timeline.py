"""`scripts/bench recovery --timeline`: what happens between a worker's death and the next step.

Nothing is added to the program for it. The stamps come from the agents' debug lines and from
etcd's watch events, as processes of the benchmark see them arrive, and from the worker script.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from elastic_etcd.core.schema import PREFIX
from tests.support.etcd import tool

from . import figures, launchers
from .nodes import STAMP, NotRecovered, Run, Stream

# As many kills in a row as it takes, one right after the other.
FLAGS = (
    *("--log-level", "debug", "--max-restarts", "1000", "--min-uptime", "0.1"),
    # One node's worker is killed again and again.
    *("--suspect-after", "0", "--stop-after-no-progress", "0"),
)
INFORMED = r"claim generation|is about to begin|generation \d+ is over"


@dataclass(frozen=True)
class Written:
    """One key of one commit. `at` is CLOCK_MONOTONIC; no value: removed."""

    at: float
    revision: int
    key: str
    value: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """Such as "acks" or "round"."""
        return self.key.split("/")[0]


class RoundsWatch:
    """Watches a job from its first key on; a process of its own stamps each answer's arrival."""

    def __init__(self, endpoint: str, root: str) -> None:
        self._root = root
        self._seen = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open until close()
        watch = [tool("etcdctl"), "--endpoints", endpoint, "watch", "--prefix", root, "-w", "json"]
        self._watch = subprocess.Popen(watch, stdout=subprocess.PIPE)
        stamp = [sys.executable, "-S", "-c", STAMP]
        self._stamp = subprocess.Popen(stamp, stdin=self._watch.stdout, stdout=self._seen)
        assert self._watch.stdout
        self._watch.stdout.close()

    def close(self) -> list[Written]:
        """All that was written, in order."""
        self._watch.send_signal(signal.SIGTERM)
        self._watch.wait()
        self._stamp.wait()
        self._seen.seek(0)
        found = []
        for line in self._seen:
            stamp, _, answer = line.partition(" ")
            for event in json.loads(answer).get("Events", []):
                kv = event["kv"]
                key = base64.b64decode(kv["key"]).decode()[len(self._root) + 1 :]
                value = json.loads(base64.b64decode(kv["value"])) if "value" in kv else None
                found.append(Written(float(stamp), kv["mod_revision"], key, value))
        self._seen.close()
        return found


@dataclass(frozen=True)
class Kill:
    """One recovery: each stage's time after SIGKILL in seconds, and the commits it took."""

    stages: dict[str, float]
    commits: list[str]  # those that wait for each other; what is written in parallel is one


def show(
    endpoint: str, names: Sequence[str], kills: int, console: Console
) -> dict[str, dict[str, float]]:
    """Measure, and print a table for each start method; gives each stage's median in seconds."""
    found = {name: recoveries(name, endpoint, kills) for name in names}
    for name, each in found.items():
        console.print(table(name, each))
        chains = sorted({" → ".join(kill.commits) for kill in each}, key=len)
        console.print("commits in sequence, report to workers:")
        for chain in chains:
            console.print(f"  {chain.count('→') + 1}: {chain}")
        console.print()
    return {name: medians(each) for name, each in found.items()}


def recoveries(
    name: str,
    endpoint: str,
    kills: int,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Kill]:
    """Kill node 1's worker so many times, each in a world that trains.

    arguments: more of the worker's. environment: what the nodes have beside this process's.
    """
    root = f"timeline-{os.getpid()}-{name.replace(' ', '-')}"
    watch = RoundsWatch(endpoint, f"{PREFIX}/{root}")
    launcher = launchers.elastic(name, endpoint, *FLAGS, root=root)
    script = (*launcher.script, *arguments)
    run = Run(replace(launcher, script=script, environment=environment), stamped=True)
    moments: list[tuple[float, list[Stream]]] = []
    try:
        for _ in (0, 1):
            run.start()
        workers = run.settled(2)
        for _ in range(kills):
            at = time.monotonic()
            os.kill(next(w.pid for w in workers if w.mark == run.nodes[1].mark), signal.SIGKILL)
            workers = run.settled(2)
            moments.append((at, workers))
        codes = run.finish(run.nodes)
        logs = [run.directory / f"agent{index}.log" for index in (0, 1)]
        lines = [_stamped(log) for log in logs]
        if any(codes):
            raise RuntimeError(f"agents exited {codes}:\n{run.said()}")
    except NotRecovered as reason:
        raise RuntimeError(f"{name}: {reason}:\n{run.said()}") from reason
    finally:
        run.close()
        written = watch.close()
    return [_kill(at, streams, lines, written) for at, streams in moments]


def medians(kills: list[Kill]) -> dict[str, float]:
    """Each stage's median, in the order in which they come."""
    names = {name for kill in kills for name in kill.stages}
    found = {n: median(k.stages[n] for k in kills if n in k.stages) for n in names}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _stamped(log: Path) -> list[tuple[float, str]]:
    lines = (line.partition(" ") for line in log.read_text(errors="replace").splitlines())
    return [(float(at), text) for at, _, text in lines]


def _kill(
    at: float,
    streams: list[Stream],
    lines: list[list[tuple[float, str]]],
    written: list[Written],
) -> Kill:
    end = max(stream.steps[0] for stream in streams)
    stages = {"first step done": end - at}

    def first(pattern: str, log: list[tuple[float, str]]) -> list[float]:
        return [t for t, text in log if at < t < end and re.search(pattern, text)][:1]

    def add(name: str, times: Iterable[float], which: Callable[[list[float]], float] = max) -> None:
        if found := [t for t in times if at < t <= end]:
            stages[name] = which(found) - at

    commits = [w for w in written if at < w.at < end]
    rounds = [(w.at, w.value["phase"]) for w in commits if w.kind == "round" and w.value]
    add("exit seen", first(r"exited -9", lines[1]))
    add("report written", (w.at for w in commits if w.kind == "reports" and w.value), min)
    add("generation claimed", (t for t, phase in rounds if phase == "setup"), min)
    add("all agents informed", (t for log in lines for t in first(INFORMED, log)))
    add("survivor stopped", first(r"worker \d+ exited", lines[0]))  # one that parks is not
    add("round joinable", (t for t, phase in rounds if phase == "joinable"))
    add("last ack written", (w.at for w in commits if w.kind == "acks" and w.value))
    add("round frozen", (t for t, phase in rounds if phase == "frozen"))
    add("round final", (t for t, phase in rounds if phase == "final"))
    add("last agent starts workers", (t for log in lines for t in first(r"group rank", log)))
    for name in ("script", "imports", "device", "process group", "collective", "DDP"):
        label = {"script": "last script begins", "imports": "all imported"}.get(name, name)
        add(label, (s.passed[name] for s in streams if name in s.passed))
    return Kill(stages, _sequence(commits))


def _sequence(commits: list[Written]) -> list[str]:
    """Each commit by what it writes. Reports and acks of several agents wait for nobody."""
    chain: list[str] = []
    for revision in sorted({w.revision for w in commits}):
        puts = [w for w in commits if w.revision == revision and w.value is not None]
        names = [w.value["phase"] if w.kind == "round" else w.kind for w in puts if w.value]
        main = next((n for n in names if n not in ("ledger", "history")), "other")
        if main not in chain:
            chain.append(main)
        if main == "final":
            break
    return [{"reports": "report", "acks": "ack", "setup": "claim"}.get(n, n) for n in chain]


def table(name: str, kills: list[Kill]) -> Table:
    rows, last = [], 0.0
    for stage, value in medians(kills).items():
        all_of = [1e3 * kill.stages[stage] for kill in kills if stage in kill.stages]
        spread = f"{min(all_of):.1f}-{max(all_of):.1f}"
        rows.append((stage, f"{1e3 * value:.1f}", f"+{1e3 * (value - last):.1f}", spread))
        last = value
    title = f"worker SIGKILLed, {name}: {len(kills)} kills, ms after SIGKILL"
    return figures.grid(title, ("stage", "median", "more than before", "range"), rows)
