"""Three etcd members, what can be done to them, and the process that records their history."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from elastic_etcd import trampoline
from elastic_etcd.core.keys import PREFIX
from tests.e2e.processes import Changes
from tests.etcd.server import EtcdCluster, EtcdServer

from .history import Event, read
from .schedule import Fault, Kind

ROOT = Path(__file__).parents[2]
Undo = Callable[[], None]


class Member(EtcdServer):
    """A member that Ctrl-C in the terminal does not reach."""

    def command(self) -> list[str]:
        return ["setsid", *super().command()]


class Cluster:
    """`with Cluster(directory) as etcd`; all members and the recorder run, whatever happens."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        made = EtcdCluster.make(directory).members
        self.members: Sequence[EtcdServer] = [
            Member(directory, m.name, port=m.port, peer_port=m.peer_port, cluster=m.cluster)
            for m in made
        ]
        self._cluster = EtcdCluster(self.members)
        self._file = directory / "history.jsonl"

    @property
    def endpoints(self) -> str:
        return ",".join(member.endpoint for member in self.members)

    @property
    def healthy(self) -> EtcdServer:
        """Any member, once all are healed."""
        return self.members[0]

    def __enter__(self) -> Self:
        self.heal()
        own = (sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--")
        recorder = (sys.executable, "-m", "chaos_lib.recorder", self.endpoints, PREFIX)
        paths = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
        with (self._directory / "recorder.log").open("wb") as log:
            self._recorder = subprocess.Popen(
                [*own, *recorder, str(self._file)],
                env=os.environ | {"PYTHONPATH": paths},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.terminate()
        self._recorder.wait(10)
        self._cluster.kill()

    def heal(self) -> None:
        """All members run and agree."""
        self._cluster.heal()

    def inject(self, fault: Fault) -> tuple[str, Undo | None]:
        """Whom it has hit, and what ends it."""
        match fault.kind:
            case Kind.COMPACTION:
                return self._compact(), None
            case Kind.ETCD_STOP:
                member = self._role(fault.target)
                member.freeze()
                return member.name, member.thaw
            case Kind.ETCD_KILL:
                victims: Sequence[EtcdServer] = [self._role(fault.target)]
            case Kind.ETCD_MAJORITY:
                victims = self.members[:2]
            case _:
                victims = self.members
        for member in victims:
            member.kill()
        return " ".join(m.name for m in victims), lambda: start(victims)

    def events(self, job: str) -> list[Event]:
        """All of a job's that have been recorded."""
        return list(read(self._file, f"{PREFIX}/{job}/")) if self._file.exists() else []

    def record_all(self, seconds: float) -> None:
        """Wait until the record is at etcd's revision. All that is written here is recorded."""
        answer = json.loads(self.healthy.ctl("get", PREFIX, "-w", "json"))
        last = int(answer["header"]["revision"])
        changes = Changes(self._directory)
        done = changes.wait(lambda: self.recorded() >= last, seconds)
        changes.close()
        assert done, f"only {self.recorded()} of {last} revisions are recorded after {seconds} s"

    def recorded(self) -> int:
        """The revision up to which the history has been recorded."""
        if self._recorder.poll() is not None:
            raise RuntimeError((self._directory / "recorder.log").read_text())
        last = self._file.read_bytes().splitlines()[-1:] if self._file.exists() else []
        return int(json.loads(last[0])["revision"]) if last else 0

    def _compact(self) -> str:
        """Up to what is recorded: agents that are stopped may not have seen so much."""
        revision = self.recorded()
        try:
            self.healthy.ctl("--command-timeout=3s", "compact", str(revision))
            self.healthy.ctl("--command-timeout=3s", "defrag")
        except subprocess.CalledProcessError as error:
            return f"at {revision} refused: {error.stderr.strip().splitlines()[-1][-80:]}"
        return f"at {revision}"

    def _role(self, role: str) -> EtcdServer:
        """The leader, or the first member that is not; as far as it can be told."""
        for member in self.members:
            try:
                answer = member.ctl("--command-timeout=1s", "endpoint", "status", "-w", "json")
            except subprocess.CalledProcessError:
                continue
            status = json.loads(answer)[0]["Status"]
            leads = status["leader"] == status["header"]["member_id"]
            if leads == (role == "leader"):
                return member
        return self.members[-1]


def start(members: Sequence[EtcdServer]) -> None:
    """Without waiting until they serve, which they may not do without the others."""
    for member in members:
        with member.launch():
            pass
