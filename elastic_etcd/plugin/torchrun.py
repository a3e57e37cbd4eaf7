"""`torchrun --rdzv-backend etcd-v3`: the rendezvous of torch's own agent, over etcd v3.

torch finds `etcd_v3` by the entry point group "torchrun.handlers" (torch 2.6 and later). The
handler runs in torchrun's process and only talks to an agent of ours beside it (torchrun_agent.py),
which keeps the lease, watches the job and decides with the others. docs/plugin.md says how to use
it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from argparse import ArgumentTypeError
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, NoReturn

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_etcd.protocol import messages
from elastic_etcd.protocol.packets import receive
from elastic_etcd.system.startup import open_standard_streams
from elastic_etcd.times import AGENT_GONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct

    from elastic_etcd.cli.flags import Flag
    from elastic_etcd.protocol.messages import ToTorchrun

NAME = "etcd-v3"
_NO_ID = "none"  # what torchrun calls every job without --rdzv-id
_ADDED = "rank"  # to --rdzv-conf, by torchrun
# Keys of --rdzv-conf that mean something to its other backends only.
_OTHERS = {
    *("read_timeout", "close_timeout", "heartbeat_timeout", "heartbeat", "keep_alive_interval"),
    *("keep_alive_max_attempt", "is_host", "store_type", "protocol", "etcd_prefix"),
}
_STORE_TIMEOUT = 60.0  # seconds; torchrun's barrier at the end says for itself how long it waits
_LOOK = 1.0
_EXIT = "torchelastic/agent/terminal_state"  # what its keys begin with
_STARTS = 3
# By the exit code of our agent, docs/failures.md.
_ERRORS = {4: RendezvousTimeoutError, 5: RendezvousConnectionError}

log = logging.getLogger("elastic_etcd")


def etcd_v3() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Give torch, which calls this at the entry point, the creator of handlers."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler of these parameters.

    Raises ValueError for what --rdzv-conf may not say, and for a job without an id.
    """
    if params.run_id == _NO_ID:
        raise ValueError(
            "no job id: nodes that meet in one etcd need it to tell their job from others.\n"
            "Add --rdzv-id ID (accelerate: PET_RDZV_ID=ID), the same on every node"
        )
    from elastic_etcd.cli.flags import FLAGS, GONE  # noqa: PLC0415 - only where this backend is wanted

    flags = [flag for flag in FLAGS if flag.in_plugin]
    known = {key: flag for flag in flags for key in (*flag.rdzv_conf, flag.dest)}  # the last counts
    for key in sorted(params.config.keys() - known.keys() - {_ADDED}):
        if instead := GONE.get(f"--{key.replace('_', '-')}"):
            raise ValueError(f"--rdzv-conf {key} is gone: {instead}")
        if key not in _OTHERS:
            fault = f"{NAME} has no such key; it has {', '.join(flag.dest for flag in flags)}"
            raise ValueError(f"--rdzv-conf {key}: {fault}")
        log.warning("--rdzv-conf %s has no meaning for %s", key, NAME)
    return EtcdV3Handler(params.run_id, _flags(params, known))


def _flags(params: RendezvousParameters, known: dict[str, Flag]) -> list[str]:
    """The flags of our launcher; failures that torchrun counts itself never end a job here."""
    conf: dict[str, str] = {}
    for key, flag in known.items():
        value = params.config.get(key)
        if value is None or flag.kind is None:
            continue
        conf[flag.dest] = str(value)
        try:
            flag.kind(str(value))
        except (ArgumentTypeError, ValueError) as error:
            raise ValueError(f"--rdzv-conf {key}={value}: {error}") from error
    # Several torchruns of one host are several nodes.
    conf.setdefault("node_name", f"{os.uname().nodename}-{os.getpid()}")
    if params.local_addr:
        conf.setdefault("advertise", params.local_addr)
    flags = ["--etcd", params.endpoint] if params.endpoint else []  # else as the environment says
    flags += ["--job", params.run_id]
    flags += ["--nnodes", f"{params.min_nodes}:{params.max_nodes}", "--nproc-per-node", "1"]
    flags += [
        "--max-restarts",
        str(messages.UNCOUNTED),
        "--suspect-after",
        "0",
        "--hang-timeout",
        "off",
    ]
    if params.get_as_bool("rerun"):
        flags.append("--rerun")
    for key, value in conf.items():
        flags.append(f"--{key.replace('_', '-')}={value}")
    return flags


class EtcdV3Handler(RendezvousHandler):  # type: ignore[misc] # torch's is untyped
    """A node's part in the rendezvous of one job.

    All of it is called on torchrun's main thread: only `next_rendezvous` and `shutdown` wait.
    """

    def __init__(self, job: str, flags: list[str]) -> None:
        self._job = job
        self._flags = flags
        self._agent: _Agent | None = None
        self._closed = False

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """No: workers would count their restarts by themselves, and nodes count differently."""
        return False

    def get_run_id(self) -> str:
        return self._job

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        """Take part no more. The other nodes go on without this one if they are enough."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """1 if this node's workers have to be begun anew, because a node has come or gone."""
        return int(self._agent is not None and self._agent.has_news())

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next world; waits until there is one.

        Raises RendezvousConnectionError, RendezvousTimeoutError, or RendezvousClosedError when the
        job has failed; SystemExit(0) when it has succeeded without this node, SystemExit(143) when
        somebody has made this node leave it.
        """
        for _ in range(_STARTS):
            if self._closed:
                raise RendezvousClosedError
            if self._agent is None:
                self._agent = _Agent(self._flags)
            info = self._next(self._agent)
            if info is not None:
                return info
            log.warning("%s: the agent beside torchrun has ended; it is started again", NAME)
            self._agent.end(success=False)
            self._agent = None
        raise RendezvousError(f"{NAME}: the agent beside torchrun ends again and again")

    def shutdown(self) -> bool:
        """Tell the others that this node's work is done, or, while an error is raised, leave."""
        self._closed = True
        if self._agent is not None:
            self._agent.end(success=sys.exc_info()[1] is None)
            self._agent = None
        return True

    def _next(self, agent: _Agent) -> RendezvousInfo | None:
        """None if the agent has gone without a word."""
        agent.send(messages.Wanted())
        while True:
            match agent.receive():
                case messages.Formed() as world:
                    info = self._enter(agent, world)
                    if info is not None:
                        return info
                    agent.send(messages.Wanted())
                case messages.Ended():  # of a world that was left already
                    pass
                case messages.JobOver(code, error):
                    agent.end(success=False)
                    self._agent = None
                    self._over(code, error)
                case None:
                    return None

    def _over(self, code: int, error: str) -> NoReturn:
        self._closed = True
        if code == 0:
            log.info("%s: job %s has succeeded, there is nothing to do", NAME, self._job)
        if not error:  # the agent's log says why this node has left
            raise SystemExit(code)
        raise _ERRORS.get(code, RendezvousClosedError)(error)

    def _enter(self, agent: _Agent, world: messages.Formed) -> RendezvousInfo | None:
        """Meet the others at the world's store; None if the world ends before all are there."""
        try:
            found = agent.store(world) if agent.reaches(world) else None
            if found is None:
                return None
            store = _Store(agent, found)
            if store.add("arrived", 1) == world.nodes:
                store.set("all", b"")
            while not store.check(["all"]):
                with suppress(DistError):
                    store.wait(["all"], timedelta(seconds=_LOOK))
                if agent.has_news():
                    return None
            info = RendezvousStoreInfo.build(world.group_rank, store, world.addr)
        except (DistError, OSError) as error:
            log.warning("%s: the store of this world can't be reached: %s", NAME, error)
            return None
        return RendezvousInfo(store, world.group_rank, world.nodes, info)


class _Store(PrefixStore):  # type: ignore[misc] # torch's is untyped
    """A world's store, which tells the agent that this node's workers have succeeded.

    torch says so to nobody; but only then it enters its barrier at the end, in which it does not
    ask for nodes that wait.
    """

    def __init__(self, agent: _Agent, store: TCPStore) -> None:
        super().__init__(f"/{NAME}", store)
        self._agent = agent

    def add(self, key: str, amount: int) -> int:
        if key.startswith(_EXIT):
            self._agent.send(messages.Done(success=True))
        return int(super().add(key, amount))


class _Agent:
    """The process beside torchrun's, and the socket to it."""

    def __init__(self, flags: list[str]) -> None:
        open_standard_streams()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening = -1  # for a world that this node leads
        self._news = False
        fd = theirs.fileno()
        # -P: nothing in the directory of the user's script is taken for a module of ours.
        program = [sys.executable, "-P", "-m", "elastic_etcd.plugin.torchrun_agent", str(fd)]
        with theirs:
            # Without the trampoline: it watches torchrun's pid instead of the thread that starts
            # it, and leaves the job when torchrun ends.
            self._process = subprocess.Popen(
                [*program, str(os.getpid()), *flags],
                stdin=subprocess.DEVNULL,
                stdout=2,  # of our own: torchrun's output is its workers'
                pass_fds=[fd],
                start_new_session=True,
            )

    def send(self, message: Struct) -> None:
        self._news = False
        with suppress(OSError):  # it has gone, which `receive` tells
            self._socket.send(messages.encode(message))

    def receive(self) -> ToTorchrun | None:
        """The next message, waiting for it; None: the agent has gone."""
        try:
            packet, descriptors, _ = receive(self._socket, 1)
        except ConnectionError:
            return None
        if descriptors:
            (self._listening,) = descriptors
        return messages.to_torchrun(packet) if packet else None

    def has_news(self) -> bool:
        """Whether anything has been sent since the last world; never waits."""
        if not self._news:
            with suppress(BlockingIOError):
                self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                self._news = True
        return self._news

    def reaches(self, world: messages.Formed) -> bool:
        """Whether the world's store can be connected to before it ends; TCPStore sees no news."""
        end = monotonic() + _STORE_TIMEOUT
        while world.group_rank:
            if self.has_news():
                return False
            try:
                socket.create_connection((world.addr, world.port), _LOOK).close()
                break
            except OSError:
                if monotonic() > end:
                    raise
                sleep(_LOOK / 10)
        return True

    def store(self, world: messages.Formed) -> TCPStore | None:
        """The world's store, in the process of the node that leads it; None if the world ends.

        A thread waits for its answer, up to two minutes where a leader hangs: TCPStore sees no
        news.
        """
        listening, self._listening = self._listening, -1
        leads = world.group_rank == 0
        made: Future[TCPStore] = Future()
        store = partial(
            TCPStore,
            world.addr,
            world.port,
            is_master=leads,
            timeout=timedelta(seconds=_STORE_TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=listening if leads else None,
        )

        def connect() -> None:
            try:
                made.set_result(_made(store))
            except Exception as error:  # noqa: BLE001 - it is raised by result()
                made.set_exception(error)

        Thread(target=connect, name=NAME, daemon=True).start()
        while not wait([made], _LOOK / 10).done:
            if self.has_news():
                return None
        return made.result()

    def end(self, *, success: bool) -> None:
        """Say goodbye, and wait for the agent's end."""
        self.send(messages.Done(success))
        try:
            self._process.wait(AGENT_GONE)
        except subprocess.TimeoutExpired:
            log.warning("%s: the agent beside torchrun does not end: killed", NAME)
            self._process.kill()
            self._process.wait()
        self._socket.close()


def _made(store: Callable[..., TCPStore]) -> TCPStore:
    try:
        return store()
    except NotImplementedError:  # before torch 2.8 only the store without libuv takes a socket
        return store(use_libuv=False)
