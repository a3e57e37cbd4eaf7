"""`scripts/records`: real runs of this version, whose flight records its successors must replay.

They are in tests/records, in a folder for each version, and tests/unit/test_records.py replays
them. Nodes of two releases may be in one job while it is upgraded, so they have to decide alike.
"""

import argparse
import gzip
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from elastic_etcd.version import __version__
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT, Agent
from tests.support.replay import differences
from tests.support.ticking import TickingJob

RECORDS = ROOT / "tests" / "records"
ALLOWED = "allowed.txt"
TTL = 20  # seconds: no lease ends, however slow the machine is
LIMIT = 200_000  # bytes of all records of a version


class RecordedJob(TickingJob):
    """A job whose agents leave their records in its folder."""

    def start(self, node: str, *worker: str, **more: object) -> Agent:
        """As Job.start."""
        env = {"RECORD": str(self.directory / f"{self.name}-{node}-{len(self.agents)}.record")}
        program = ("tests.support.recorded_launch",)
        flags = {"nnodes": "1:3", "lease_ttl": TTL, "settle": 5, "env": env, "program": program}
        return super().start(node, *worker, **(flags | more))


def restart(job: RecordedJob, _: EtcdServer) -> None:
    """A worker is killed, and all begin anew."""
    agents = [job.start(node, nnodes="2") for node in ("n1", "n2")]
    job.kill_worker(job.trains(2))
    job.trains(2, after=1)
    job.finish(*agents)


def leave(job: RecordedJob, _: EtcdServer) -> None:
    """A node of three leaves and comes back."""
    n1, n2, n3 = (job.start(node) for node in ("n1", "n2", "n3"))
    generation = job.trains(3)
    n2.terminate()
    job.exits(n2, 143)
    generation = job.trains(2, after=generation)
    n2 = job.start("n2")
    job.trains(3, after=generation)
    job.finish(n1, n2, n3)


def drain(job: RecordedJob, _: EtcdServer) -> None:
    """A node of three is drained by command, waits, and is undrained."""
    n1, n2, n3 = (job.start(node) for node in ("n1", "n2", "n3"))
    generation = job.trains(3)
    give(job, "drain", "n1", "--wait")
    job.exits(n1, 143)
    generation = job.trains(2, after=generation)
    n1 = job.start("n1")
    job.said(n1, "drained")
    give(job, "undrain", "n1")
    job.trains(3, after=generation)
    job.finish(n1, n2, n3)


def failed(job: RecordedJob, _: EtcdServer) -> None:
    """Workers are killed until no restart is left."""
    agents = [job.start(node, nnodes="2", max_restarts=1) for node in ("n1", "n2")]
    generation = job.trains(2)
    job.kill_worker(generation)
    job.kill_worker(job.trains(2, after=generation), rank=1)
    for agent in agents:
        job.exits(agent, 3)


def etcd(job: RecordedJob, server: EtcdServer) -> None:
    """The server is killed and started again under a job that trains on."""
    agents = [job.start(node, nnodes="2") for node in ("n1", "n2")]
    generation = job.trains(2)
    server.kill()
    for agent in agents:
        job.said(agent, "training goes on")
    server.start()
    job.goes_on(generation)
    job.finish(*agents)


RUNS: tuple[Callable[[RecordedJob, EtcdServer], None], ...] = (
    restart,
    leave,
    drain,
    failed,
    etcd,
)


def give(job: RecordedJob, command: str, *words: str) -> None:
    """As somebody at a shell."""
    ours = [sys.executable, "-m", "elastic_etcd", command, job.name, *words]
    subprocess.run([*ours, "--etcd", str(job.endpoint)], cwd=ROOT, check=True)


def record(directory: Path) -> list[Path]:
    """Play all runs; the records of their agents."""
    server = EtcdServer(directory)
    server.start()
    found = []
    for run in RUNS:
        job = RecordedJob(server.endpoint, directory / run.__name__, run.__name__)
        try:
            run(job, server)
            job.check()
        finally:
            job.close()
        found += sorted(job.directory.glob(f"{job.name}-*.record"))
        print(f"{run.__name__}: {len(found)} records so far", flush=True)
    server.kill()
    return found


def unexpected(folder: Path) -> list[str]:
    """What is decided otherwise now than in this folder's records, and is not allowed there.

    A line of its allowed.txt is `RECORD:LINE WHY`. One without a difference is told, too.
    """
    allowed = folder / ALLOWED
    lines = allowed.read_text().splitlines() if allowed.exists() else []
    known = {line.split()[0] for line in lines if len(line.split()) > 1}
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        name = path.name.partition(".")[0]
        try:
            found |= {f"{name}:{number}": text for number, text in differences(path)}
        except ValueError as error:
            found[f"{name}:0"] = f"it can't be read any more: {error}"
    told = [
        f"{where} of release {folder.name}: this event is decided otherwise now.\n"
        f"If that is meant, CHANGELOG.md has to say why, and the line\n"
        f"    {where} WHY\n"
        f"goes into tests/records/{folder.name}/{ALLOWED}.\n{text}"
        for where, text in found.items()
        if where not in known
    ]
    return told + [
        f"{where} of release {folder.name} is decided as it was: take it out of {ALLOWED}"
        for where in sorted(known - {*found})
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/records",
        description="Record some short runs of this version, for tests/unit/test_records.py.",
    )
    parser.parse_args()
    folder = RECORDS / __version__
    with tempfile.TemporaryDirectory(prefix="records-") as directory:
        made = record(Path(directory))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in made:
            packed = gzip.compress(path.read_bytes(), mtime=0)
            (folder / f"{path.stem}.jsonl.gz").write_bytes(packed)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{len(made)} records of {__version__} in {folder.relative_to(ROOT)}: {size} bytes")
    return 0 if size < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
