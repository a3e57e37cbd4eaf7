"""What a job leaves behind when it has ended: there must be nothing, and no traceback of ours."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Job
from tests.e2e.traces import keys, leases
from tests.etcd.server import EtcdServer

from .fleet import Fleet
from .history import Replay
from .schedule import TTL

SHARED = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
# Lines of an agent's own begin with its name; a worker's, with its node and rank in brackets.
OURS = re.compile(
    r"^(?!\[n\d+ ).*(Traceback \(most|Exception ignored|never retrieved|never awaited|Fatal Python)"
)
# A worker's, but what torch says of peers that are gone.
THEIRS = re.compile(r"^\[n\d+ .*(Fatal Python|Segmentation|AssertionError|File .*elastic_etcd/)")


def left(fleet: Fleet, etcd: EtcdServer) -> list[str]:
    """All that is there and should not be, after the time that leases take to end."""
    found, job = [], fleet.job
    kinds: dict[str, Callable[[], list[str]]] = {
        "processes": job.leftovers,
        "keys": lambda: [k for k in keys(etcd, job.name) if not _stays(k)],
        "leases": lambda: sorted(leases(etcd)),
        "files": fleet.files,
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
            if OURS.search(line) or (not plain and THEIRS.search(line)):
                excerpt = "\n".join(lines[max(0, number - 5) : number + 25])
                found.append(f"{path.name}, line {number + 1}:\n{excerpt}")
                break
    return found


def _stays(key: str) -> bool:
    return key == "outcome" or key.startswith("history/")


def _in_the_end(find: Callable[[], list[str]], seconds: float) -> list[str]:
    """What is found after so long, unless there is nothing before. Asking takes its time."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        continue
    return found


def _shared(job: Job) -> list[str]:
    """Segments that torch made: their names have the process in them."""
    pids = {str(event.pid) for event in job.events("start")}
    return [p.name for p in SHARED.iterdir() if pids & set(re.findall(r"\d+", p.name))]
