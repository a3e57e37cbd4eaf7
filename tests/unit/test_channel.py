"""The channel's two ends, over real sockets and between real processes."""

import asyncio
import inspect
import json
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import pytest
from msgspec import Struct

import elastic_etcd as ee
from elastic_etcd.agent import channel as agent_end
from elastic_etcd.agent import guardian, prefork
from elastic_etcd.agent.channel import ChannelServer, WorkerChannel
from elastic_etcd.children import forkserver, guardian_process
from elastic_etcd.errors import AgentGone, EtcdUnreachable, StaleGeneration, UsageError
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.protocol import messages
from elastic_etcd.protocol.messages import (
    AskCurrent,
    Bye,
    Change,
    Current,
    Disconnected,
    Diverged,
    Elastic,
    FromAgent,
    FromWorker,
    Gone,
    Heard,
    Hello,
    Interrupt,
    Keep,
    Leaving,
    NextWorld,
    Parked,
    Recall,
    TrainingDone,
    encode,
    from_agent,
    from_worker,
)
from elastic_etcd.protocol.packets import address_of
from elastic_etcd.train import agent_channel as worker_end
from elastic_etcd.train.agent_channel import Channel

DOCUMENT = Path(__file__).parents[2] / "docs" / "contributing" / "channel.md"
HELLO = Hello(1, 1, 0, 7)
H = TypeVar("H", bound=Heard)


class Agent:
    """The agent's end, and what it has heard; `answer` is what it says of a generation."""

    def __init__(self) -> None:
        self.server = ChannelServer(self._heard)
        self.name = self.server.open()
        self.heard: asyncio.Queue[tuple[WorkerChannel, Heard]] = asyncio.Queue()
        self.answer: tuple[bool | None, str] | None = True, ""

    def _heard(self, channel: WorkerChannel, message: Heard) -> None:
        if not isinstance(message, AskCurrent):
            self.heard.put_nowait((channel, message))
        elif self.answer:
            channel.send(Current(message.id, *self.answer))

    async def hears(self, kind: type[H]) -> tuple[WorkerChannel, H]:
        async with asyncio.timeout(20):
            channel, message = await self.heard.get()
        assert isinstance(message, kind)
        return channel, message


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    agent = Agent()
    monkeypatch.setenv("ELASTIC_ETCD_SOCKET", agent.name)
    monkeypatch.setenv("ELASTIC_ETCD_WORKER_PID", "")
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "7")
    monkeypatch.setenv("LOCAL_RANK", "0")
    yield agent
    agent.server.close()


@pytest.fixture
async def worker(agent: Agent) -> AsyncIterator[Channel]:
    """In this process; what it waits for must be asked for in a thread."""
    worker = await asyncio.to_thread(Channel, agent.name)
    yield worker
    worker._socket.close()


def memory(text: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text)
    return fd


async def process(code: str) -> str:
    """What a worker process prints; it must exit 0."""
    argv = (sys.executable, "-c", textwrap.dedent(code))
    child = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    async with asyncio.timeout(20):
        output, _ = await child.communicate()
    assert child.returncode == 0
    return output.decode()


async def test_what_is_kept_outlives_its_worker(agent: Agent) -> None:
    keep = """
        import os, signal
        from elastic_etcd.train.agent_channel import agent
        fd = os.memfd_create("test")
        for text in (b"older", b"newer"):
            fd = os.memfd_create("test")
            os.write(fd, text)
            agent().keep("state", fd)
    """
    await process(keep)
    await agent.hears(Disconnected)
    recall = """
        import os
        from elastic_etcd.train.agent_channel import agent
        print(os.pread(agent().recall("state"), 5, 0), agent().recall("other"))
    """
    assert await process(recall) == "b'newer' None\n"
    (fd,) = agent.server.kept.values()
    agent.server.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_r5_a_worker_can_ask_whether_its_node_is_leaving(
    agent: Agent, worker: Channel
) -> None:
    """Also in the handler of a signal that came in the middle of another question."""
    ask = """
        import multiprocessing, signal
        import elastic_etcd as ee
        from elastic_etcd.train.agent_channel import agent

        def on_alarm(*_):
            print(ee.leaving())

        signal.signal(signal.SIGALRM, on_alarm)
        agent().recall("nothing")
        with agent()._requests:
            signal.raise_signal(signal.SIGALRM)
        child = multiprocessing.get_context("fork").Process(target=on_alarm)
        child.start()
        child.join()
    """
    assert not await asyncio.to_thread(worker.leaving)
    assert await process(ask) == "False\nFalse\n"
    agent.server.leaving = True
    assert await asyncio.to_thread(worker.leaving)
    assert await process(ask) == "True\nTrue\n"


async def test_r5_who_listens_is_told_that_its_node_is_leaving(
    agent: Agent, worker: Channel
) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def hear(said: object) -> None:
        loop.call_soon_threadsafe(heard.put_nowait, said)

    with worker.listening(hear):
        worker.send(Elastic())
        channel, _ = await agent.hears(Elastic)
        for leaving in (False, True):
            channel.send(Change(7, "", leaving=leaving))
            await heard.get()
            assert worker.leaving() is leaving


def test_r5_nobody_leaves_without_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_ETCD_SOCKET", raising=False)
    assert not worker_end.leaving()


async def test_workers_of_other_local_ranks_have_their_own(
    agent: Agent, worker: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(worker.keep, "state", memory(b"of 0"))
    monkeypatch.setenv("ELASTIC_ETCD_LOCAL_RANK", "1")  # LOCAL_RANK may be 0 for all of them
    other = await asyncio.to_thread(Channel, agent.name)
    assert await asyncio.to_thread(other.recall, "state") is None
    other._socket.close()


async def test_a_generation_is_current_or_not_or_nobody_knows(
    agent: Agent, worker: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(worker.raise_if_stale)
    agent.answer = False, "the job is in generation 8"
    with pytest.raises(StaleGeneration, match="generation 7: the job is in generation 8"):
        await asyncio.to_thread(worker.raise_if_stale)
    agent.answer = None, "etcd is away"
    with pytest.raises(EtcdUnreachable, match="etcd is away"):
        await asyncio.to_thread(worker.raise_if_stale)
    agent.answer = None
    monkeypatch.setattr(worker_end, "ANSWER_TIMEOUT", 0.01)
    with pytest.raises(EtcdUnreachable, match=r"within 0\.01 s"):
        await asyncio.to_thread(worker.raise_if_stale)


def test_r7_who_is_no_worker_can_t_ask_for_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_ETCD_SOCKET", raising=False)
    with pytest.raises(UsageError, match="this process is no worker of"):
        ee.raise_if_stale()


@pytest.mark.parametrize("listens", [False, True])
async def test_an_answer_that_comes_too_late_is_no_other_s(
    agent: Agent, worker: Channel, listens: bool
) -> None:
    def late_then_again() -> None:
        with pytest.MonkeyPatch.context() as impatient:
            impatient.setattr(worker_end, "ANSWER_TIMEOUT", 0.01)
            with pytest.raises(EtcdUnreachable):
                worker.raise_if_stale()
        agent.answer = True, ""
        channel = next(iter(agent.server.channels))
        stale = Current(worker._number, False, "stale")
        loop.call_soon_threadsafe(channel.send, stale)
        worker.raise_if_stale()

    loop = asyncio.get_running_loop()
    agent.answer = None
    if listens:
        with worker.listening(print):
            await asyncio.to_thread(late_then_again)
    else:
        await asyncio.to_thread(late_then_again)


async def test_an_answer_to_another_question_is_refused(agent: Agent, worker: Channel) -> None:
    agent.answer = None
    (channel,) = agent.server.channels
    channel.send(Leaving(worker._number + 1, leaving=False))
    with pytest.raises(AgentGone, match="answered something else"):
        await asyncio.to_thread(worker.raise_if_stale)


async def test_a_worker_hears_while_it_asks(agent: Agent, worker: Channel) -> None:
    heard: asyncio.Queue[FromAgent | Gone] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def hear(message: FromAgent | Gone) -> None:
        loop.call_soon_threadsafe(heard.put_nowait, message)

    fd = memory(b"mine")
    change = Change(7, "n3 joins", leaving=False)
    with worker.listening(hear):
        worker.send(Elastic())
        channel, _ = await agent.hears(Elastic)
        assert (channel.pid, channel.local_rank, channel.generation) == (os.getpid(), 0, 7)
        channel.send(change)
        await asyncio.to_thread(worker.keep, "state", fd)
        again = await asyncio.to_thread(worker.recall, "state")
        assert again is not None
        assert os.pread(again, 4, 0) == b"mine"
        assert await heard.get() == change
        worker.send(Parked(worker.generation, "a lone surrogate \ud800" + "x" * 10000))
        _, parked = await agent.hears(Parked)
        assert parked.error == ("a lone surrogate ?" + "x" * 10000)[:4096]
        world = NextWorld(8, "n3 joins", {"RANK": "0"})
        channel.send(world)
        assert await heard.get() == world
        assert channel.generation == 8
    assert not [t for t in threading.enumerate() if t.name.startswith("elastic_etcd")]
    await asyncio.to_thread(worker.raise_if_stale)


async def test_an_agent_that_is_gone(agent: Agent, worker: Channel) -> None:
    heard: asyncio.Queue[FromAgent | Gone] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def hear(message: FromAgent | Gone) -> None:
        loop.call_soon_threadsafe(heard.put_nowait, message)

    with worker.listening(hear):
        agent.server.close()
        assert isinstance(await heard.get(), Gone)
        for ask in (worker.raise_if_stale, partial(worker.send, Elastic())):
            with pytest.raises(AgentGone, match="has hung up"):
                await asyncio.to_thread(ask)
    with pytest.raises(AgentGone, match="no agent answers"):
        Channel(agent.name)


async def test_without_a_launcher_and_in_children_there_is_no_channel(agent: Agent) -> None:
    forked = """
        import os
        from elastic_etcd.protocol.messages import Elastic
        from elastic_etcd.train import agent_channel as channel
        mine = channel.agent()
        if os.fork() == 0:
            assert channel.agent() is None
            try:
                mine.send(Elastic())
            except channel.AgentGone as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        mine.raise_if_stale()
        mine.send(Elastic())
    """
    assert "this process was forked from a worker" in await process(forked)
    await agent.hears(Elastic)
    await agent.hears(Disconnected)
    spawned = """
        import multiprocessing
        from elastic_etcd.train import agent_channel as channel
        if __name__ == "__main__":
            with multiprocessing.get_context("fork").Pool(1) as pool:
                print(pool.apply(channel.agent))
    """
    assert await process(spawned) == "None\n"
    assert (
        await process(
            "import os; del os.environ['ELASTIC_ETCD_SOCKET']\n"
            "from elastic_etcd.train import agent_channel as channel; print(channel.agent())"
        )
        == "None\n"
    )


async def test_t4_a_program_that_a_worker_starts_is_not_the_worker(agent: Agent) -> None:
    """But the first that asks is, whatever has started it: a shell, a profiler."""
    program = """
        import os, subprocess, sys
        from elastic_etcd.train import agent_channel
        print(agent_channel.agent() is not None, flush=True)
        assert not agent_channel.leaving()
        if sys.argv[1:] == ["first"]:
            subprocess.run([sys.executable, "-c", os.environ["PROGRAM"]], check=True)
            os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"]])
    """
    code = textwrap.dedent(program)
    started = f"""
        import os, subprocess, sys
        os.environ["PROGRAM"] = {code!r}
        subprocess.run([sys.executable, "-c", os.environ["PROGRAM"], "first"], check=True)
    """
    assert await process(started) == "True\nFalse\nTrue\n"


async def test_listening_ends_though_a_child_holds_its_descriptors(agent: Agent) -> None:
    assert (
        await process("""
        import os, signal
        from elastic_etcd.train.agent_channel import agent
        with agent().listening(print):
            child = os.fork()
            if child == 0:
                signal.pause()
        os.kill(child, signal.SIGKILL)
        print("over")
    """)
        == "over\n"
    )


async def test_a_process_ends_though_nobody_has_ended_its_listening(agent: Agent) -> None:
    """A signal's handler may raise just before `listening` is left, as a DataLoader's does."""
    assert (
        await process("""
        from elastic_etcd.train.agent_channel import agent
        listening = agent().listening(print)
        listening.__enter__()
        print("over")
    """)
        == "over\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_not_answered(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    nobody = f"""
        import os, socket
        os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect({address_of(agent.name)!r})
        print(sock.recv(1))
    """
    assert await process(nobody) == "b''\n"
    assert "is not answered: it is user 65534" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be in another container")
async def test_the_same_user_of_another_container_is_not_answered() -> None:
    """Both may be on the host's network, and abstract names are those of a network."""
    code = """
        import asyncio, logging
        from elastic_etcd.agent.channel import ChannelServer
        async def main():
            logging.basicConfig(stream=sys.stdout, format="%(message)s")
            print(ChannelServer(lambda *_: None).open(), flush=True)
            await asyncio.to_thread(sys.stdin.read)
        import sys
        asyncio.run(main())
    """
    contained = ("unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c")
    code, pipe = textwrap.dedent(code), subprocess.PIPE
    other = await asyncio.create_subprocess_exec(*contained, code, stdin=pipe, stdout=pipe)
    assert other.stdout
    name = (await other.stdout.readline()).decode().strip()
    with seqpacket() as sock:
        sock.connect(address_of(name))
        assert await asyncio.to_thread(sock.recv, 1) == b""
    said, _ = await other.communicate(b"")
    assert said == b"process 0 calls and is not answered: it is in another container\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_a_name_that_another_user_has_taken_is_no_agent(agent: Agent) -> None:
    """An agent's name is free from its end on, and its worker may live a moment longer."""
    agent.server.close()
    with seqpacket() as sock:
        sock.bind(address_of(agent.name))
        os.seteuid(65534)
        try:
            sock.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(AgentGone, match="user 65534 answers at @elastic_etcd-"):
            Channel(agent.name)


async def test_what_is_shared_is_the_first_one_s(agent: Agent) -> None:
    """Until all that share it have dropped it."""
    share = """
        import os
        os.environ["ELASTIC_ETCD_LOCAL_RANK"] = "{rank}"
        from elastic_etcd.train.agent_channel import agent
        fd = os.memfd_create("test")
        os.write(fd, b"{rank}")
        print(os.pread(agent().share("state", fd), 1, 0))
        {then}
    """
    assert await process(share.format(rank=1, then="")) == "b'1'\n"
    for rank in (2, 1):
        assert await process(share.format(rank=rank, then="agent().drop('state')")) == "b'1'\n"
    assert await process(share.format(rank=3, then="")) == "b'3'\n"
    (fd,) = agent.server.shared.values()
    agent.server.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_the_document_shows_what_is_sent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, worker: Channel
) -> None:
    sent: dict[str, dict[str, bytes]] = {"worker": {}, "agent": {}}

    def record(message: Struct) -> bytes:
        packet = encode(message)
        who = "worker" if isinstance(message, FromWorker) else "agent"
        sent[who][kind_of(type(message))] = packet
        return packet

    monkeypatch.setattr(messages, "encode", record)
    again = await asyncio.to_thread(Channel, agent.name)
    await asyncio.to_thread(again.keep, "state0.0", memory(b""))
    await asyncio.to_thread(again.recall, "state0.0")
    await asyncio.to_thread(again.share, "state0.node0", memory(b""))
    await asyncio.to_thread(again.raise_if_stale)
    await asyncio.to_thread(again.leaving)
    again.send(Elastic())
    again.send(Parked(again.generation, ""))
    again.send(TrainingDone())
    again.send(Diverged(7, "replicas differ", named=True, alone=True))
    again.drop("state0.0")
    channel, _ = await agent.hears(Elastic)
    for told in (Change(7, "", leaving=False), Interrupt(7, ""), NextWorld(8, "", {}), Bye("")):
        assert channel.send(told)
    again._socket.close()

    shown: dict[str, dict[str, bytes]] = {"worker": {}, "agent": {}}
    who = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## From the "):
            who = line.split()[-1]
        elif line.startswith("    {"):
            packet = line.strip().encode()
            message = (from_agent if who == "agent" else from_worker)(packet)
            assert encode(message) == packet
            shown[who][kind_of(type(message))] = packet
    assert shown["worker"].keys() == sent["worker"].keys() == kinds(FromWorker)
    assert shown["agent"].keys() == sent["agent"].keys() == kinds(FromAgent)
    for end, packets in sent.items():
        for kind, packet in packets.items():
            assert types(shown[end][kind]) == types(packet)


def test_what_a_forked_worker_becomes_is_described() -> None:
    (shown,) = re.findall(r"^{.*}$", DOCUMENT.read_text(), re.MULTILINE)
    written = prefork._assignment(["python", "-u", "train.py"], {"RANK": "0"}, [1, 2])
    with os.fdopen(written) as file:
        assert json.loads(shown) == json.load(file)
    read = re.findall(r'\border\["(\w+)"\]', inspect.getsource(forkserver))
    assert set(read) == json.loads(shown).keys()


def test_what_the_guardian_is_told_first_is_described() -> None:
    (told,) = re.findall(r"The guardian's first packet .*?\. Each", DOCUMENT.read_text(), re.DOTALL)
    packet = json.loads(guardian._first_packet(EtcdConfig(("h:1",)), "mark", ("folder",)))
    more = packet.keys() - {field.name for field in fields(EtcdConfig)}
    assert set(re.findall(r"`([a-z]+)`", told)) == more
    assert set(re.findall(r'\bconfig\.pop\("(\w+)"\)', inspect.getsource(guardian_process))) == more


def kind_of(message: type[Struct]) -> str:
    return str(message.__struct_config__.tag)


def kinds(union: object) -> set[str]:
    return {kind_of(message) for message in get_args(union)}


def types(packet: bytes) -> dict[str, type]:
    return {name: type(value) for name, value in json.loads(packet).items()}


def seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def test_hello_comes_first_and_once(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    for spoken in ([Elastic()], [HELLO, HELLO], [Hello(2, 1, 0, 7)]):
        with seqpacket() as sock:
            sock.connect(address_of(agent.name))
            for message in spoken:
                sock.sendall(encode(message))
            await hung_up(sock)
    assert caplog.text.count("hello comes first, and once") == 2
    assert "it speaks version 2, this agent 1" in caplog.text


async def test_no_local_rank_is_negative(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """The agent has -1 for one that has not said hello."""
    with seqpacket() as sock:
        sock.connect(address_of(agent.name))
        sock.sendall(b'{"type":"hello","v":1,"pid":1,"local_rank":-1,"generation":7}')
        await hung_up(sock)
    assert "Expected `int` >= 0 - at `$.local_rank`" in caplog.text
    assert agent.heard.empty()


async def hung_up(sock: socket.socket) -> None:
    """Until the agent hangs up, whatever it says before."""
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(20):
        try:
            while await loop.sock_recv(sock, 1 << 16):
                pass
        except ConnectionResetError:
            pass


@pytest.mark.parametrize(
    ("flood", "why"),
    [
        ([b"x" * (1 << 17)], "more than 65536 bytes at once"),
        ([b'{"type":"current","id":1}'] * 3, ""),
        ([b'{"type":"current","id":%d}' % i for i in range(100)], "too many questions"),
        ([b'{"type":"recall","id":1,"name":"%s"}' % (b"x" * 250)] * 4000, "does not read"),
        ([b'{"type":"recall","id":1,"name":"%s"}' % (b"x" * 257)], "length <= 256 - at `$.name`"),
        ([b'{"type":"keep","id":1,"name":"x"}'], "a keep has one descriptor"),
        ([b"[" * 60000], "malformed"),
        ([b'{"type":"elastic","x":' + b"[" * 60000 + b"}"], "malformed"),
        ([b'{"type":"parked","generation":true,"error":""}'], "got `bool` - at `$.generation`"),
        ([b'{"type":"elastic"}\n{"type":"elastic"}'], "malformed"),
    ],
    ids=lambda of: of or "none" if isinstance(of, str) else "",
)
async def test_floods(
    agent: Agent, caplog: pytest.LogCaptureFixture, flood: list[bytes], why: str
) -> None:
    agent.answer = None
    loop = asyncio.get_running_loop()
    with seqpacket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sock.connect(address_of(agent.name))
        sock.setblocking(False)
        try:
            for packet in (encode(HELLO), *flood):
                await loop.sock_sendall(sock, packet)
        except (BrokenPipeError, ConnectionResetError):
            assert why
        if not why:
            sock.shutdown(socket.SHUT_WR)
        await agent.hears(Disconnected)
    assert why in caplog.text
    assert bool(why) == ("hanging up on the worker of local rank 0" in caplog.text)


@pytest.mark.usefixtures("no_garbage")
async def test_descriptors_that_nobody_asked_for(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    fd = os.open("/dev/null", os.O_RDONLY)
    for message, count in ((Elastic(), 1), (Elastic(), 200), (Keep(1, "x"), 2)):
        with seqpacket() as sock:
            sock.connect(address_of(agent.name))
            sock.sendall(encode(HELLO))
            socket.send_fds(sock, [encode(message)], [fd] * count)
            await hung_up(sock)
    with seqpacket() as sock:
        sock.connect(address_of(agent.name))
        socket.send_fds(sock, [encode(HELLO)], [fd])
        await hung_up(sock)
    with seqpacket() as sock:
        sock.connect(address_of(agent.name))
        sock.sendall(encode(HELLO))
        for number in range(129):
            socket.send_fds(sock, [encode(Keep(number, str(number)))], [fd])
        await hung_up(sock)
    os.close(fd)
    assert caplog.text.count("a descriptor without a keep") == 2
    assert "a keep has one descriptor" in caplog.text
    assert "too many descriptors at once" in caplog.text
    assert "more than 128 descriptors to keep" in caplog.text
    assert len(agent.server.kept) == 128
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 128


@pytest.mark.usefixtures("no_garbage")
async def test_descriptors_that_nobody_takes(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    """One worker must not use up those that its agent may have."""
    fd = memory(b"kept")
    before = most = len(list(Path("/proc/self/fd").iterdir()))
    loop = asyncio.get_running_loop()
    with seqpacket() as sock:
        sock.setblocking(False)
        sock.connect(address_of(agent.name))
        await loop.sock_sendall(sock, encode(HELLO))
        socket.send_fds(sock, [encode(Keep(1, "x"))], [fd])
        try:
            for number in range(5000):
                await loop.sock_sendall(sock, encode(Recall(number, "x")))
                await asyncio.sleep(0)
                if number % 100 == 0:
                    most = max(most, len(list(Path("/proc/self/fd").iterdir())))
        except (BrokenPipeError, ConnectionResetError):
            pass
    await agent.hears(Disconnected)
    os.close(fd)
    assert "it does not read what it is told" in caplog.text
    assert most < before + 200


async def test_no_descriptors_are_left_for_a_call(
    agent: Agent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken later, and the loop does not spin meanwhile."""
    monkeypatch.setattr(agent_end, "_ACCEPT_AGAIN", 0.01)
    listener = agent.server._socket
    assert listener is not None
    refused = iter([OSError(24, "Too many open files")])

    taken = listener.accept

    class Full:
        def accept(self) -> Any:
            for error in refused:
                raise error
            return taken()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    agent.server._socket = Full()  # type: ignore[assignment]
    caplog.set_level(logging.WARNING)
    worker = await asyncio.to_thread(Channel, agent.name)
    await asyncio.to_thread(worker.raise_if_stale)
    worker._socket.close()
    assert "a worker's call can't be taken: Too many open files" in caplog.text
