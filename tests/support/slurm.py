"""A real Slurm on this machine: munge, a controller, and nodes that are a slurmd each."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from elastic_etcd.etcd.embedded import free_ports
from elastic_etcd.system import trampoline
from tests.support.debian import NotToBeHad, unpacked
from tests.support.job import PATIENCE
from tests.support.processes import MARK, marked, send

# And libraries of theirs that few machines have.
PACKAGES = (
    "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0"
)
# linuxproc: what is sent to a step reaches every process in it, as with cgroups where
# SignalChildrenProcesses is on; more than that no cluster sends. The nodes have as many
# CPUs as the examples ask for, by their own word (config_overrides).
CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
Epilog={epilog}
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64"


class Slurm:
    """`with running():` it runs, with nodes n1, n2 …; their folders are in `folder`.

    `epilog` is a program that runs as root on each node of a job that has ended. Raises NotToBeHad.
    """

    def __init__(self, folder: Path, nodes: int, epilog: str = "/bin/true") -> None:
        if os.geteuid() != 0:
            raise NotToBeHad("Slurm's daemons need root")
        self.folder = folder / "slurm"
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._mark = uuid.uuid4().hex
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._root = unpacked(PACKAGES, "bookworm", "slurm-bookworm") / "usr"
        (libraries,) = self._root.glob("lib/*-linux-gnu")
        self._env = os.environ | {
            "LD_LIBRARY_PATH": f"{libraries}/slurm-wlm:{libraries}",
            "PATH": f"{self._root}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            MARK: self._mark,
        }
        self._configure(libraries / "slurm-wlm", epilog)
        self._check()

    def _check(self) -> None:
        try:
            self.run("sinfo", "--version")
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            raise NotToBeHad(f"Debian's Slurm does not run here: {said}") from None

    def _configure(self, plugins: Path, epilog: str) -> None:
        host, ports = os.uname().nodename, free_ports(1 + len(self.nodes))
        nodes = (
            NODE.format(name=name, host=host, port=port)
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        for name in ("munge", "state", *self.nodes):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o600)
        told = {"host": host, "ports": ports, "plugins": plugins, "folder": self.folder}
        text = CONFIG.format(nodes="\n".join(nodes), epilog=epilog, **told)
        (self.folder / "slurm.conf").write_text(text)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this is open; what is left of jobs is ended with it."""
        programs = self._root / "sbin"
        with ExitStack() as stack:
            stack.callback(lambda: send(signal.SIGKILL, marked(self._mark)))
            munge = [f"--{name}-file={self.folder}/munge/{name}" for name in ("pid", "log", "seed")]
            munge += [f"--key-file={self.folder}/key", f"--socket={self.folder}/munge/socket"]
            stack.enter_context(self._daemon("munged", programs / "munged", "-F", "-f", *munge))
            self.wait("munged", (self.folder / "munge/socket").exists)
            stack.enter_context(self._daemon("slurmctld", programs / "slurmctld-wlm", "-D"))
            step = ("-d", str(programs / "slurmstepd-wlm"))
            for node in self.nodes:
                daemon = self._daemon(node, programs / "slurmd-wlm", "-D", "-N", node, *step)
                stack.enter_context(daemon)
            self.wait("all nodes are idle", self._idle)
            try:
                yield
            finally:
                self._cancel()

    @contextmanager
    def _daemon(self, name: str, *command: object) -> Iterator[None]:
        tied = (sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--")
        with (self.folder / f"{name}.log").open("wb") as log:
            argv = [*tied, *map(str, command)]
            process = subprocess.Popen(argv, env=self._env, stdout=log, stderr=log)
        self._daemons.append(process)
        try:
            yield
        finally:
            self._daemons.remove(process)
            process.kill()
            process.wait()

    def _idle(self) -> bool:
        try:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%t").split()
        except subprocess.CalledProcessError:  # the controller is not there yet
            return False
        return states == ["idle"] * len(self.nodes)

    def _cancel(self) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        self.run("scancel", "--user=root")
        self.wait("no job is left", lambda: not self.run("squeue", "--noheader").strip())

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """What a command of Slurm's prints. Raises CalledProcessError."""
        done = subprocess.run(
            command,
            cwd=self.folder.parent,
            env=self._env | (env or {}),
            check=True,
            capture_output=True,
            text=True,
        )
        told: str = done.stdout
        return told

    def sbatch(self, *arguments: str, **env: str) -> str:
        """The id of the job that this makes."""
        return self.run("sbatch", "--parsable", *arguments, env=env).strip()

    def field(self, job: str, name: str) -> str:
        """Of what scontrol shows of a job: JobState, Restarts, ExitCode …"""
        shown = self.run("scontrol", "show", "job", job)
        (value,) = set(re.findall(rf"\b{name}=(\S+)", shown)) or {""}
        return str(value)

    def ends(self, job: str, state: str = "COMPLETED", code: str = "0:0") -> None:
        """Wait until a job has ended like this."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait(f"job {job} ends", lambda: self.field(job, "JobState") in over)
        assert (self.field(job, "JobState"), self.field(job, "ExitCode")) == (state, code), (
            self.account()
        )

    def wait(self, what: str, until: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Until this is true; fails with all that was said if it takes too long."""
        deadline = time.monotonic() + seconds
        while not until():
            assert all(daemon.poll() is None for daemon in self._daemons), self.account()
            assert time.monotonic() < deadline, f"not yet: {what}\n{self.account()}"
            time.sleep(0.2)

    def account(self) -> str:
        """What jobs and daemons have said."""
        logs = [*self.folder.parent.glob("*.log"), *self.folder.glob("*.log")]
        ends = (f"--- {log.name}\n{log.read_text(errors='replace')[-5000:]}" for log in logs)
        return "\n".join(ends)
