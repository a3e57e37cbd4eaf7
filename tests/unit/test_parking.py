"""Workers that outlive their generation: they park, are sent on, or end; real processes."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.agent import termination
from elastic_etcd.agent import workers as agent_workers
from elastic_etcd.agent.config import LogConfig
from elastic_etcd.agent.file_timers import Expired
from elastic_etcd.agent.output.logs import Logs
from elastic_etcd.protocol.messages import Change, Interrupt
from tests.unit.watched import Watched

# Parks when it is told to, or at once; what it hears goes to its file, a line each.
WORKER = """
    import json, os, signal, socket, sys
    said = open(sys.argv[1], "a", buffering=1)
    how = sys.argv[2:]
    generation = int(os.environ["ELASTIC_ETCD_GENERATION"])
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.connect(os.environ["ELASTIC_ETCD_SOCKET"].replace("@", "\\0"))

    def say(kind, **fields):
        agent.send(json.dumps({"type": kind, **fields}).encode())

    rank = int(os.environ["LOCAL_RANK"])
    say("hello", v=1, pid=os.getpid(), local_rank=rank, generation=generation)
    if "plain" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        said.write(json.dumps({"type": "ready"}) + "\\n")
        signal.pause()
    if "slow" in how:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    say("elastic")
    if "alone" in how:
        if "slow" in how:
            signal.sigwait([signal.SIGUSR1])
        say("parked", generation=generation, error="RuntimeError: Connection reset by peer")
    if "finishes" in how:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        say("finished")
    if "ends" in how:
        sys.exit(0)
    if "asks" in how:
        say("current", id=3)
    while packet := agent.recv(1 << 16):
        message = json.loads(packet)
        said.write(json.dumps(message) + "\\n")
        if message["type"] in ("change", "interrupt") and "deaf" not in how:
            if "slow" in how:
                signal.sigwait([signal.SIGUSR1])
            say("parked", generation=generation, error="")
            if "leaves" in how:
                agent.close()
                signal.pause()
        elif message["type"] == "world":
            generation = message["generation"]
        elif message["type"] == "bye":
            sys.exit(0)
"""


class Script:
    """A worker's command, and what it has heard."""

    def __init__(self, folder: Path, name: str, *how: str) -> None:
        code = textwrap.dedent(WORKER)
        self._said = folder / name
        self._said.touch()
        self.command = (sys.executable, "-I", "-S", "-c", code, str(self._said), *how)

    @property
    def heard(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._said.read_text().splitlines()]

    def hears(self, kind: str) -> bool:
        return kind in [message["type"] for message in self.heard]


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    logs = Logs.open(LogConfig(log_dir=str(tmp_path)), job="j", node="n", role="r")
    async with logs, Watched.open(logs) as watched:
        yield watched


@contextmanager
def stranger(script: Script, env: dict[str, str]) -> Iterator[None]:
    """The script as a process that the agent has not started."""
    with subprocess.Popen(script.command, env={**os.environ, **env}) as process:
        yield
        process.kill()


def is_gone(pid: int) -> bool:
    """And reaped."""
    return not Path(f"/proc/{pid}").exists()


def can_park(watched: Watched) -> bool:
    """Whether all that run have said so."""
    return all(worker.channel for worker in watched.workers._running.values())


def channels(watched: Watched) -> list[Any]:
    """Of those that can park."""
    return [w for w in watched.workers._running.values() if w.channel]


async def elastic(watched: Watched) -> list[int]:
    """Wait until all can park; their pids."""
    pids = await watched.started()
    await watched.turns(lambda: can_park(watched))
    await watched.turns(lambda: sorted(watched.guarded.groups) == sorted(pids))
    return pids


async def test_a_parked_worker_is_sent_on_with_what_is_new_to_it(
    watched: Watched, tmp_path: Path
) -> None:
    script = Script(tmp_path, "one")
    watched.launch(script.command)
    (pid,) = await elastic(watched)
    watched.workers.stop(1000, Change(1, "n2 joins", leaving=False))
    await watched.emptied()
    assert watched.ends == []
    assert watched.pids == {}
    assert watched.groups == watched.guarded.groups == (pid,)

    watched.launch(script.command, generation=2, first=3)
    assert watched.pids == {3: pid}
    await watched.turns(lambda: script.hears("world"))
    change, world = script.heard[1:]
    assert change == {"type": "change", "generation": 1, "reason": "n2 joins", "leaving": False}
    assert (world["generation"], world["env"]["ELASTIC_ETCD_GENERATION"]) == (2, "2")
    assert "LOCAL_RANK" not in world["env"], "it has that already"
    watched.workers.stop(1000, Interrupt(2, "n2 is lost"))
    await watched.emptied()
    await watched.workers.end("all is done")
    assert is_gone(pid)
    assert script.heard[-1] == {"type": "bye", "reason": "all is done"}
    assert not watched.guarded.groups


async def test_it_is_told_whether_all_workers_can_park(watched: Watched, tmp_path: Path) -> None:
    """Then --join-settle is 0, since a change costs them nothing."""
    one, two = Script(tmp_path, "one"), Script(tmp_path, "two")
    plain = (sys.executable, "-I", "-S", "-c", "import signal; signal.pause()")
    watched.launch(one.command, two.command)
    await elastic(watched)
    await watched.until(lambda: watched.elastic == [True])

    watched.workers.stop(1000, Change(1, "n2 joins", leaving=False))
    await watched.emptied()
    watched.launch(one.command, two.command, generation=2)
    await watched.until(lambda: watched.elastic == [True, True])
    watched.kill()
    await watched.emptied()

    watched.elastic.clear()
    watched.launch(one.command, plain, generation=3)
    await watched.started()
    await watched.turns(lambda: any(w.channel for w in watched.workers._running.values()))
    watched.kill()
    await watched.emptied()
    assert True not in watched.elastic


async def test_one_that_has_hung_up_is_replaced(watched: Watched, tmp_path: Path) -> None:
    script = Script(tmp_path, "one", "leaves")
    watched.launch(script.command)
    (pid,) = await elastic(watched)
    watched.workers.stop(1000, Interrupt(1, "n2 is lost"))
    await watched.emptied()
    (worker,) = watched.workers._parked.values()
    await watched.turns(lambda: worker.channel is None)
    watched.launch(script.command, generation=2)
    (other,) = await elastic(watched)
    await watched.turns(lambda: not watched.workers._parked)
    assert is_gone(pid)
    assert other != pid
    assert watched.ends == [], "it was no worker of this generation"
    watched.kill()
    await watched.emptied()


async def test_one_that_does_not_park_in_its_grace_is_killed(
    watched: Watched, tmp_path: Path
) -> None:
    parks, deaf = Script(tmp_path, "one"), Script(tmp_path, "two", "deaf")
    watched.launch(parks.command, deaf.command)
    pids = await elastic(watched)
    watched.workers.stop(2.0, Interrupt(1, "n2 is lost"))
    await watched.emptied()
    assert deaf.hears("interrupt")
    assert [(f.rank, f.code) for f in watched.failures] == [(1, -signal.SIGKILL)]
    assert watched.groups == (pids[0],)


async def test_g3_one_that_can_park_has_a_grace_of_its_own(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What others do for a failure's 3 s is of no use; it may have communicators to abort."""
    plain = Script(tmp_path, "zero", "plain")
    slow, deaf = Script(tmp_path, "one", "slow"), Script(tmp_path, "two", "deaf")
    watched.launch(plain.command, slow.command, deaf.command)
    pids = await watched.started()
    await watched.turns(lambda: len(channels(watched)) == 2 and plain.hears("ready"))
    watched.workers.stop(0.1, Interrupt(1, "n2 is lost"), 1000)
    assert [f.rank for f in [await watched.failure()]] == [0]
    await watched.turns(lambda: slow.hears("interrupt") and deaf.hears("interrupt"))
    assert watched.pids == {1: pids[1], 2: pids[2]}
    os.kill(pids[1], signal.SIGUSR1)
    await watched.turns(lambda: pids[1] not in watched.pids.values())
    watched.workers.stop(0.1, Interrupt(1, "n2 is lost"), 0.2)
    await watched.emptied()
    assert "rank 2: not stopped within 0.2 s: SIGKILL" in caplog.text
    assert [(f.rank, f.code) for f in watched.failures] == [(0, -9), (2, -9)]
    assert watched.groups == (pids[1],)


async def test_g3_a_worker_that_is_late_to_park_is_told_of(
    watched: Watched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(termination, "_LATE", 0.05)
    watched.launch(Script(tmp_path, "one", "deaf").command)
    await elastic(watched)
    watched.workers.stop(0.1, Interrupt(1, "n2 is lost"), 1000)
    late = "n2 is lost: rank 0: not out of its step for 0.1 s; they will be killed"
    await watched.turns(lambda: late in caplog.text)
    watched.kill()
    await watched.emptied()


async def test_t3_for_newcomers_nobody_is_killed_but_told_of(
    watched: Watched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(termination, "_LATE", 0.05)
    parks, slow = Script(tmp_path, "one"), Script(tmp_path, "two", "deaf")
    watched.launch(parks.command, slow.command)
    pids = await elastic(watched)
    watched.workers.stop(None, Change(1, "n3 joins", leaving=False))
    await watched.turns(lambda: "n3 joins: rank 1: no state.check() for 0.1 s" in caplog.text)
    assert "they are waited for" in caplog.text
    assert watched.ends == []
    assert set(watched.groups) == set(pids)
    watched.workers.stop(2, Interrupt(1, "n2 is lost"))  # which has changed everything
    await watched.emptied()
    assert slow.hears("interrupt")
    assert "rank 1: not stopped within 2 s: SIGKILL" in caplog.text
    assert [(f.rank, f.code) for f in watched.failures] == [(1, -signal.SIGKILL)]


async def test_t4_one_that_has_finished_is_told_by_sigterm(
    watched: Watched, tmp_path: Path
) -> None:
    script = Script(tmp_path, "one", "finishes")
    watched.launch(script.command)
    await watched.until(lambda: watched.finished == [True])
    assert watched.workers.finished
    watched.workers.stop(None, Change(1, "n2 joins", leaving=False))
    watched.workers.stop(1000, Interrupt(1, "n2 is lost"))
    await watched.emptied()
    assert [f.code for f in watched.failures] == [7]
    assert not script.hears("change")
    assert not script.hears("interrupt")


async def test_one_that_parks_by_itself_is_a_failure_only_if_nobody_else_is(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_workers, "PARKED_PATIENCE", 0.2)
    alone = Script(tmp_path, "one", "alone")
    watched.launch(alone.command)
    await watched.turns(lambda: watched.workers._parked)
    assert watched.empties == [], "its generation may still go on without it"
    failure = await watched.failure()
    assert failure.message == "it lost its peers: RuntimeError: Connection reset by peer"
    watched.workers.stop(1000)
    await watched.emptied()

    watched.launch(alone.command, generation=2)  # the same, and goes on as if nothing had been
    watched.workers.stop(1000, Interrupt(2, "n2 is lost"))
    await watched.turns(lambda: alone.hears("interrupt"))
    await watched.emptied()
    assert watched.ends == []


@pytest.mark.parametrize("how", ["ends", ""])
async def test_t11_one_that_lost_its_peers_names_the_one_that_has_left(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(agent_workers, "PARKED_PATIENCE", 0.2)
    other = Script(tmp_path, "0", "slow", "alone")
    finished = Script(tmp_path, "1", "finishes", how)
    watched.launch(other.command, finished.command)
    pid, leaver = await watched.started()
    if how:  # its end is known before its last word is read
        os.waitid(os.P_PID, leaver, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - no loop turns
        await watched.until(lambda: watched.ends)
    else:
        await watched.until(lambda: watched.finished == [True])
    await watched.turns(lambda: watched.workers._running[pid].channel)
    for _ in range(10):
        watched.workers.pages[0].step(told=True)
    os.kill(pid, signal.SIGUSR1)
    failure = await watched.failure()
    assert failure.hang == "rank 1 on n left ee.run while rank 0 on n was in step 11"
    assert (failure.node, failure.pid, failure.code) == ("", 0, 0), "it is no fault of this node"
    assert failure.message == "it lost its peers: RuntimeError: Connection reset by peer"
    watched.kill()
    watched.workers.stop(0)
    await watched.emptied()


async def test_a_parked_worker_that_dies_is_nobody_s_failure(
    watched: Watched, tmp_path: Path
) -> None:
    script = Script(tmp_path, "one")
    watched.launch(script.command)
    (pid,) = await elastic(watched)
    watched.workers.stop(1000, Interrupt(1, "n2 is lost"))
    await watched.emptied()
    os.kill(pid, signal.SIGKILL)
    await watched.turns(lambda: not watched.workers._parked)
    assert not watched.guarded.groups
    watched.launch(script.command, generation=2)
    (other,) = await elastic(watched)
    assert other != pid
    watched.kill()
    await watched.emptied()
    assert [f.pid for f in watched.failures] == [other]


async def test_a_question_about_the_generation_goes_to_etcd(
    watched: Watched, tmp_path: Path
) -> None:
    script = Script(tmp_path, "one", "asks")
    watched.launch(script.command)
    await watched.turns(lambda: script.hears("current"))
    answer = {"type": "current", "id": 3, "current": False, "reason": "generation 1 is over"}
    assert script.heard[1] == answer
    watched.kill()
    await watched.emptied()


async def test_what_a_worker_of_an_older_generation_says_is_of_no_interest(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was started with the variables of generation 1, and generation 2 is running."""
    caplog.set_level(logging.DEBUG, "elastic_etcd")
    watched.launch(["sleep", "1000"], generation=2)
    await watched.started()
    script = Script(tmp_path, "one", "alone")
    env = {"ELASTIC_ETCD_SOCKET": watched.workers._channels.name, "ELASTIC_ETCD_GENERATION": "1"}
    with stranger(script, env | {"LOCAL_RANK": "0"}):
        await watched.turns(lambda: caplog.text.count("is no worker of this node") == 2)
        assert not watched.workers._parked
        assert not can_park(watched)
    watched.kill()
    await watched.emptied()


async def test_a_timer_that_expires_at_the_barrier_ends_nobody(tmp_path: Path) -> None:
    script, path = Script(tmp_path, "said"), tmp_path / "timers"
    logs = Logs.open(LogConfig(log_dir=str(tmp_path)), job="j", node="n", role="r")

    def expire(watched: Watched, scope: str) -> None:
        timer = {"pid": watched.groups[0], "scope_id": scope, "expiration_time": 0, "signal": 9}
        path.write_text(json.dumps(timer) + "\n")

    async with logs, Watched.open(logs, timer_file=str(path)) as watched:
        await watched.workers.prestart()
        timers, expired = watched.workers._timers, list[Expired]()
        assert timers
        act = timers._expired

        def hear(found: Expired) -> None:
            expired.append(found)
            act(found)

        timers._expired = hear
        watched.launch(script.command)
        (pid,) = await elastic(watched)
        watched.workers.stop(1000, Change(1, "n2 joins", leaving=False))
        await watched.emptied()
        expire(watched, "short")
        await watched.turns(lambda: bool(expired))
        assert watched.groups == (pid,)
        watched.launch(script.command, generation=2)
        expire(watched, "long")
        assert (await watched.failure()).pid == pid
        assert [str(hang) for hang in watched.hangs] == ["rank 0 on n: timer 'long' expired"]
