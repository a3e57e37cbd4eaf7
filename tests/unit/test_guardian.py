"""The guardian with real processes: what it ends, what it leaves alone, and what ends it."""

import asyncio
import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.agent.guardian import Guardian
from elastic_etcd.children import guardian_process
from elastic_etcd.errors import EtcdUnreachable
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.etcd.retry import boottime
from elastic_etcd.system.child_process import exited
from elastic_etcd.times import GUARD_LIFE
from tests.support.aio import elapse
from tests.support.discards import next_discarded
from tests.support.disks import interpreter_not_found_yet
from tests.support.stand_in import DEADLINE, agent, ended, running, worker

NOWHERE = EtcdConfig(("127.0.0.1:1",), user="me", password="hidden-word")
MEMORY = 15_000  # kB


class Observed(Guardian):
    """Tells when it has started or lost a process, and when a thawed one has the newest state."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__(NOWHERE)
        self._caplog = caplog
        self.started, self.ended, self.drained = (asyncio.Event() for _ in range(3))
        self.full = False
        self.pids: list[int] = []

    @property
    def said(self) -> list[str]:
        """What it has written into the log."""
        return [r.getMessage() for r in self._caplog.records if r.name.endswith("agent.guardian")]

    def _on_start(self, starting: Any) -> None:
        super()._on_start(starting)
        if self.pid is not None:
            self.pids.append(self.pid)
            self.started.set()

    def _start_again(self, what: str) -> None:
        super()._start_again(what)
        self.ended.set()

    def _send(self) -> None:
        super()._send()
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        if loop.remove_writer(self._socket):
            loop.add_writer(self._socket, self._send)
            self.full = True
            self.drained.clear()
        elif self.full:
            self.drained.set()

    def killed(self) -> None:
        """Kill its process; what follows can be waited for."""
        assert self.pid is not None
        self.started.clear()
        self.ended.clear()
        os.kill(self.pid, signal.SIGKILL)

    async def replaced(self) -> None:
        """Kill its process, and wait for the next one."""
        self.killed()
        await happens(self.started)
        assert len({*self.pids}) == len(self.pids), "another process each time"

    async def says(self, count: int) -> None:
        """Wait until it has lost a process or failed to start one so many times."""
        while len(self.said) < count:
            self.ended.clear()
            await happens(self.ended)

    def end_of_file(self) -> None:
        """What its process sees when the agent has ended."""
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_WR)


async def happens(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), DEADLINE)


@pytest.fixture
async def guardian(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Observed]:
    it = Observed(caplog)
    it.start()
    await happens(it.started)
    yield it
    it.dismiss()


@contextlib.contextmanager
def waiting_guard() -> Iterator["tuple[subprocess.Popen[bytes], socket.socket]"]:
    """The process by itself, which has read all that was sent but the last few packets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        ours.settimeout(DEADLINE)
        command = [sys.executable, "-I", "-S", guardian_process.__file__, "1", str(GUARD_LIFE)]
        with subprocess.Popen(command, stdin=theirs.fileno()) as process:
            theirs.close()
            ours.send(b'{"path": [], "folders": []}')
            for _ in range(1000):  # each waits for room, which only the reader makes
                ours.send(b"0 0 0")
            yield process, ours
            process.kill()


def open_in(pid: int) -> set[str]:
    """What the process has open."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(fd.readlink()))
    return found


def test_the_groups_of_a_killed_agent_end_whatever_they_ignore() -> None:
    with worker() as spared, agent(NOWHERE) as it:
        it.kill()
        assert ended(*(pid for pids in it.workers for pid in pids), it.guardian)
        assert all(map(running, spared))
        said = (
            rf"20\d\d-\S+Z elastic_etcd: the agent \(pid {it.pid}\) is gone: killed what it ran\n"
        )
        assert re.fullmatch(said, it.words())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_to_the_agent_s_group_ends_the_agent_only(number: signal.Signals) -> None:
    with agent(NOWHERE) as it:
        os.killpg(it.pid, number)
        assert it.process.wait(DEADLINE)
        assert ended(*(pid for pids in it.workers for pid in pids), it.guardian)


def test_a_stopped_agent_is_not_a_dead_one() -> None:
    with agent(NOWHERE) as it:
        os.kill(it.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, it.pid, os.WSTOPPED)
        assert running(it.guardian)
        assert all(running(pid) for pids in it.workers for pid in pids)
        os.kill(it.guardian, signal.SIGKILL)
        os.kill(it.pid, signal.SIGCONT)
        assert "SIGKILL" in it.line()["said"]  # it goes on as before
        assert all(running(pid) for pids in it.workers for pid in pids)


async def test_each_death_is_said_once_and_a_quick_one_slows_the_next_start(
    guardian: Observed,
) -> None:
    first = guardian.pid
    await guardian.replaced()
    second = guardian.pid
    await guardian.replaced()
    assert guardian.said == [
        f"the guardian (pid {first}) was killed by SIGKILL; another one is started now",
        f"the guardian (pid {second}) was killed by SIGKILL; another one is started in 1 s",
    ]


async def test_the_one_that_replaces_another_guards_the_same(guardian: Observed) -> None:
    with worker() as pids:
        guardian.guard(groups=(pids[0],))
        await guardian.replaced()
        guardian.end_of_file()
        assert await asyncio.to_thread(ended, *pids)


async def test_r19_the_loop_turns_while_its_program_is_not_found(
    guardian: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel waits for the disk of what is to be executed."""
    with worker() as pids:
        with interpreter_not_found_yet(tmp_path, monkeypatch):
            guardian.killed()
            await happens(guardian.ended)
            await elapse(0.3)
            assert guardian.pid is None
            guardian.guard(groups=(pids[0],))
        await happens(guardian.started)
        guardian.end_of_file()
        assert await asyncio.to_thread(ended, *pids)


async def test_r19_dismissed_before_it_is_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = next_discarded(monkeypatch, "elastic_etcd.agent.guardian")
    guardian = Observed(caplog)
    guardian.start()
    guardian.dismiss()
    async with asyncio.timeout(DEADLINE):
        assert await exited(await given_up) == -signal.SIGKILL
    assert guardian.pid is None


async def test_one_that_cannot_be_started_is_tried_again(
    guardian: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nowhere/python")
        guardian.killed()
        await guardian.says(2)
        assert guardian.pid is None
        guardian.guard(lease=0, groups=())
    what = "the guardian can't be started (No such file or directory)"
    assert guardian.said[1:] == [f"{what}; another one is started in 1 s"]
    guardian.started.clear()
    await happens(guardian.started)
    assert guardian.pid is not None


async def test_one_that_ends_at_once_is_tried_again(
    guardian: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", shutil.which("false"))
        await guardian.replaced()  # by one that may be dead by now
        guardian.guard(lease=0, groups=())
        await guardian.says(2)
    assert guardian.said[1].endswith("exited 1; another one is started in 1 s")
    guardian.started.clear()
    await happens(guardian.started)
    assert guardian.pid is not None


async def test_r7_what_trains_ends_at_its_time_and_what_is_parked_does_not(
    guardian: Observed,
) -> None:
    with worker() as trains, worker() as waits, worker() as later:
        guardian.guard(groups=(trains[0],), parked=(waits[0],), until=boottime() + 0.2)
        assert await asyncio.to_thread(ended, *trains)
        guardian.guard(groups=(later[0],))
        assert await asyncio.to_thread(ended, *later), "the agent did not know that it was too late"
        assert all(map(running, waits))
        assert guardian.pid in guardian.pids, "it goes on"


async def test_r7_what_may_train_for_longer_in_time_lives_on(guardian: Observed) -> None:
    """Also where the guardian itself was stopped when it was told so."""
    assert guardian.pid is not None
    with worker() as spared, worker() as trains:
        guardian.guard(groups=(spared[0],), until=boottime() + 0.2)
        os.kill(guardian.pid, signal.SIGSTOP)
        await elapse(0.4)
        guardian.guard(until=boottime() + 60)
        os.kill(guardian.pid, signal.SIGCONT)
        guardian.guard(groups=(), parked=(spared[0],))
        guardian.guard(groups=(trains[0],), until=boottime() - 1)
        assert await asyncio.to_thread(ended, *trains)
        assert all(map(running, spared))


async def test_dismissed_it_ends_nothing(guardian: Observed) -> None:
    with worker() as pids:
        guardian.guard(groups=(pids[0],))
        pid = guardian.pid
        guardian.dismiss()
        assert guardian.pid is None
        assert not Path(f"/proc/{pid}").exists()  # nor as a zombie
        assert all(map(running, pids))
    assert guardian.said == []


async def test_dismissed_before_another_one_is_started(guardian: Observed) -> None:
    await guardian.replaced()
    guardian.killed()
    await happens(guardian.ended)
    again = guardian._respawn._timer._handle
    guardian.dismiss()
    assert again
    assert again.cancelled()
    assert guardian.pid is None


async def test_a_frozen_guardian_stops_nobody_and_hears_the_newest_when_it_thaws(
    guardian: Observed,
) -> None:
    assert guardian.pid is not None
    with worker() as older, worker() as newest:
        os.kill(guardian.pid, signal.SIGSTOP)
        for _ in range(5_000):
            guardian.guard(groups=(older[0],))
            guardian.guard(groups=(older[0], newest[0]))
        guardian.guard(groups=(newest[0],))
        assert guardian.full
        os.kill(guardian.pid, signal.SIGCONT)
        await happens(guardian.drained)
        guardian.end_of_file()
        assert await asyncio.to_thread(ended, *newest)
        assert all(map(running, older))


async def test_a_frozen_guardian_can_be_dismissed(guardian: Observed) -> None:
    assert guardian.pid is not None
    os.kill(guardian.pid, signal.SIGSTOP)
    guardian.dismiss()
    assert guardian.pid is None


def test_signals_do_not_end_the_process() -> None:
    """And it kills although it can load nothing: its path is empty."""
    with worker() as pids, waiting_guard() as (process, agent_end):
        for number in guardian_process.IGNORED:
            process.send_signal(number)
        agent_end.send(f"0 0 1 {pids[0]}".encode())
        agent_end.close()
        assert ended(*pids)


def test_an_agent_that_ends_without_anything_to_guard() -> None:
    with waiting_guard() as (process, agent_end):
        agent_end.close()
        assert process.wait(DEADLINE) == 0


def test_memory_while_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting_guard() as (process, _):
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    lines = (line.split() for line in rollup.splitlines()[1:])
    sizes = {name: int(size) for name, size, _ in lines}
    with capsys.disabled():
        print(f" guardian: RSS {sizes['Rss:']} kB, PSS {sizes['Pss:']} kB ", end="")
    assert sizes["Pss:"] <= sizes["Rss:"] < MEMORY


def test_secrets_are_in_no_argument_and_no_variable() -> None:
    secret = NOWHERE.password
    assert secret
    given = {"ELASTIC_ETCD_PASSWORD": secret, "ETCDCTL_PASSWORD": secret}
    with agent(NOWHERE, env={**given, "ETCDCTL_USER": f"me:{secret}"}) as it:
        assert secret in Path(f"/proc/{it.pid}/environ").read_text()
        for what in ("environ", "cmdline"):
            assert secret not in Path(f"/proc/{it.guardian}/{what}").read_text()


async def test_nobody_else_holds_the_agent_s_end(guardian: Observed) -> None:
    """Else the end of the agent would not be the end of file."""
    assert guardian.pid is not None
    assert guardian._socket is not None
    end = str(Path(f"/proc/self/fd/{guardian._socket.fileno()}").readlink())
    greedy = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    with subprocess.Popen(greedy, close_fds=False) as child:
        holders = {pid for pid in (os.getpid(), child.pid, guardian.pid) if end in open_in(pid)}
        child.kill()
    assert holders == {os.getpid()}


@pytest.mark.parametrize("dead", [["dead:1"], ["dead:1", "dead:2"]])
def test_an_endpoint_that_fails_when_another_has_answered_is_no_news(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dead: list[str]
) -> None:
    """Nobody asked for its error any more, which asyncio then wrote to the agent's terminal."""
    asked = []

    class Endpoint:
        def __init__(self, config: EtcdConfig) -> None:
            (self._name,) = config.endpoints

        async def revoke(self, lease: int, timeout: float) -> None:
            assert timeout > 0
            asked.append((self._name, lease))
            if self._name.startswith("dead"):
                raise EtcdUnreachable(f"{self._name} does not answer")

    monkeypatch.setattr("elastic_etcd.etcd.client.Client", Endpoint)
    assert guardian_process._revoke({"endpoints": ["live:1", *dead]}, 7) == ""
    assert guardian_process._revoke({"endpoints": dead}, 7).startswith("dead:")
    gc.collect()
    assert {(name, 7) for name in ("live:1", *dead)} == set(asked)
    assert caplog.records == []
