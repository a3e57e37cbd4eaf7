"""Idle connections between agents, whose end shows at once that a node is dead.

A node whose processes all die is missed when its lease ends. Its kernel, or its host's, knows at
once, and ends its connections. So every member calls the coordinator of a final round and keeps the
link open. It carries a hello of fixed size, an answer of one byte, and a goodbye of one byte before
an orderly end, and no more.

A link that ends without a goodbye is checked by calling again. When that is refused the lease is
revoked: a member's by the coordinator, the coordinator's by a member of the last world's first two
ranks. That ends no more than the lease's own end would, only sooner; whoever is revoked by mistake
joins again. Nothing else proves a death: not silence, nor a call that is taken and then cut or not
answered. Its agent may be stopped or have no place, and strangers can fill a node's places. Nothing
that goes wrong here is an error of the job.
"""

import asyncio
import ipaddress
import logging
import os
import resource
import socket
import struct
from _operator import _compare_digest  # as hmac has it, which loads OpenSSL: 3 MB
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from elastic_etcd.agent.inbox import Tasks, Timer
from elastic_etcd.core.lifecycle import PeerDead
from elastic_etcd.core.schema import Contact, Member, Phase
from elastic_etcd.core.view import View
from elastic_etcd.errors import ElasticEtcdError
from elastic_etcd.etcd.retry import jitter
from elastic_etcd.system.kernel import NO_DESCRIPTOR
from elastic_etcd.system.sockets import listen
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import CALL, CALL_AGAIN, HELLO, OWN_LOOK_UP, PROOF

HELLO_FORM = struct.Struct(">16sQ")  # the nonce of who is called, and the caller's lease
_ASKING = 0  # a caller's lease: it only wants to know who is there
_HERE, _BUSY, _GOODBYE = b"\x06", b"\x15", b"\x04"
_BACKLOG = 256
_STRANGERS = 64  # connections that have not said hello yet; from there on the newest is sent away
_BACK = 16  # calls to callers at a time
_FIRST = 2  # ranks of the last world that revoke the coordinator's lease
_SPREAD = 0.001  # seconds for each participant: the coordinator is not called by all at once
_SOON = 1.0  # seconds until a call is tried again, and longer from time to time
_QUIET = (60, 15, 4)  # the kernel asks on a quiet link after 60 s, and 4 times each 15 s

log = logging.getLogger(__name__)


class Found(Enum):
    """The result of a call."""

    HERE = "here"
    BUSY = "busy"  # it has no place for this caller now
    SILENT = "silent"  # nothing is known
    GONE = "gone"  # its machine refuses the call


class End(Enum):
    """How a link ended."""

    GOODBYE = "goodbye"
    SILENT = "silent"  # as the network does
    BROKEN = "broken"  # as a kernel ends what a process leaves behind


_Link: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _call(contact: Contact, lease: int, within: float) -> _Link | Found:
    """Call an agent as the member with `lease`; gives the link to it, if it answers in time."""
    deadline = asyncio.get_running_loop().time() + within
    try:
        ipaddress.ip_address(contact.addr)  # a name would have to be looked up
        async with asyncio.timeout_at(deadline):
            reader, writer = await asyncio.open_connection(contact.addr, contact.port)
    except ConnectionRefusedError:
        return Found.GONE
    except (OSError, ValueError):  # TimeoutError among them: this agent's loop may have stood still
        return Found.SILENT
    answer = b""
    try:
        _keep_alive(writer.get_extra_info("socket"))
        writer.write(HELLO_FORM.pack(bytes.fromhex(contact.nonce), lease))
        async with asyncio.timeout_at(deadline):
            answer = await reader.read(1)
    except OSError:
        pass
    finally:
        if answer != _HERE:
            writer.close()
    if answer == _HERE:
        return reader, writer
    return Found.BUSY if answer == _BUSY else Found.SILENT


async def _ask_whether_there(contact: Contact, within: float = PROOF) -> Found:
    found = await _call(contact, _ASKING, within)
    if isinstance(found, Found):
        return found
    _hang_up(found[1])
    return Found.HERE


async def _is_gone(contact: Contact) -> bool:
    """Whether an agent is gone, as far as that can be known in a moment.

    A kernel that ends what a process leaves behind may take a call, and cut it, before it refuses.
    """
    loop, pause = asyncio.get_running_loop(), 0.005
    deadline = loop.time() + PROOF
    while (left := deadline - loop.time()) > 0:
        found = await _ask_whether_there(contact, left)
        if found is not Found.SILENT:
            return found is Found.GONE
        await asyncio.sleep(pause)
        pause *= 2
    return False


def _hang_up(writer: asyncio.StreamWriter) -> None:
    """End a link in order."""
    if not writer.is_closing():
        writer.write(_GOODBYE)
        writer.close()


def _end_of(error: Exception | None) -> End:
    """How a link ended on which no goodbye came."""
    return End.BROKEN if error is None or isinstance(error, ConnectionError) else End.SILENT


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask, so that a link to what vanished in silence does not stay for ever."""
    idle, pause, count = _QUIET
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As asyncio does, but for a call that no descriptor is free for: it is taken a second later.

    The kernel has answered it already. asyncio would tell of each by a traceback, a hundred times.
    """
    error = context.get("exception")
    if "socket" in context and isinstance(error, OSError) and error.errno in NO_DESCRIPTOR:
        log.debug("%s: %s", context["message"], error.strerror)
    else:
        loop.default_exception_handler(context)


class _Caller(asyncio.BufferedProtocol):
    """A connection that was made to this agent; no more than a hello and a goodbye is read."""

    def __init__(self, links: "PeerLinks") -> None:
        self.lease = _ASKING
        self.answers = False  # it can be called, too: else its silence would show nothing
        self.over = False  # its end shows nothing
        self._links = links
        self._buffer = bytearray(HELLO_FORM.size + len(_GOODBYE))
        self._filled = 0
        self._transport: asyncio.Transport | None = None
        self._late = Timer()  # to say hello

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _keep_alive(transport.get_extra_info("socket"))
        self._late.start(HELLO, self.cut)
        self._links.came(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        before, self._filled = self._filled, self._filled + nbytes
        if before < HELLO_FORM.size <= self._filled:
            self._hear_hello()
        if self._filled > HELLO_FORM.size:  # goodbye, or what nobody has to say
            self.cut()

    def connection_lost(self, error: Exception | None) -> None:
        self._late.cancel()
        self._links.ended(self, _end_of(error))

    def hang_up(self) -> None:
        """End it in order."""
        if self._transport and not self._transport.is_closing():
            self.over = True
            self._transport.write(_GOODBYE)
            self._transport.close()

    def send_away(self) -> None:
        """End it, and say that this is for want of a place."""
        if self._transport:
            self.over = True
            self._transport.write(_BUSY)
            self._transport.close()

    def cut(self) -> None:
        """End it at once."""
        if self._transport:
            self.over = True
            self._transport.abort()

    def _hear_hello(self) -> None:
        self._late.cancel()
        nonce, self.lease = HELLO_FORM.unpack_from(self._buffer)
        match self._links.greeted(self, nonce):
            case Found.HERE if self._transport:
                self._transport.write(_HERE)
                if self.lease == _ASKING:
                    self._transport.close()
            case Found.BUSY:
                self.send_away()
            case _:
                self.cut()


class PeerLinks:
    """This agent's link to its coordinator, and those of the agents that call it.

    `open`, then `follow(...)` at each step of the agent, and `close`. `revoke` ends a lease, and
    may raise ElasticEtcdError.
    """

    def __init__(self, tasks: Tasks, revoke: Callable[[int], Awaitable[None]]) -> None:
        self._tasks = tasks
        self._revoke = revoke
        self._view: View | None = None
        self._lease = 0
        self._server: asyncio.Server | None = None
        self._nonce = b""
        self._strangers = set[_Caller]()
        self._callers: dict[int, _Caller] = {}  # by lease
        self._back = asyncio.Semaphore(_BACK)
        self._called: Contact | None = None
        self._calling: asyncio.Task[None] | None = None
        self._warned = False  # that the coordinator can't be called

    async def open(self, address: str) -> Contact | None:
        """Listen at `address`, with a nonce for a new lease; None where that can't be done."""
        self.close()
        try:
            sock = await in_thread(partial(listen, address, 0, _BACKLOG), OWN_LOOK_UP)
        except OSError as error:
            why = error.strerror or "its name is not known"
            log.info("no proof of death: this node can't be called at %s: %s", address, why)
            return None
        self._nonce = os.urandom(16)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_note)
        caller = partial(_Caller, self)
        self._server = await loop.create_server(caller, sock=sock, backlog=_BACKLOG)
        addr, port = sock.getsockname()[:2]
        return Contact(addr, port, self._nonce.hex())

    def follow(self, view: View | None, lease: int) -> None:
        """Call whom the member with `lease` sees coordinate a final round."""
        if view and view.newer:  # then this agent may not write, nor revoke
            view = None
        self._view, self._lease = view, lease
        now = view.round if view else None
        if view is None or now is None:
            self._call_coordinator(None, 0.0)
        elif now.phase is Phase.FINAL:
            other = None if now.coordinator == lease else view.coordinator
            self._call_coordinator(other, _SPREAD * now.nodes)

    def close(self) -> None:
        """Say goodbye to all."""
        self._call_coordinator(None, 0.0)
        self._nonce = b""
        if self._server:
            self._server.close()
            self._server = None
        for caller in self._callers.values():
            caller.hang_up()
        for stranger in [*self._strangers]:
            stranger.cut()
        self._callers = {}

    # --- the link to the coordinator

    def _call_coordinator(self, other: Member | None, spread: float) -> None:
        contact = other.contact if other else None
        if contact == self._called:
            return
        self._called = contact
        if self._calling:
            self._calling.cancel()  # which says goodbye
        self._calling = None
        if other and contact:
            self._calling = self._tasks.create(self._keep_link(other, contact, spread))

    async def _keep_link(self, to: Member, contact: Contact, spread: float) -> None:
        """Keep a link to an agent; when it breaks find out why, if this agent is in charge."""
        soon = pause = max(_SOON, spread)
        await asyncio.sleep(jitter.uniform(0.0, spread))
        while True:
            found = await _call(contact, self._lease, CALL)
            if not isinstance(found, Found):
                self._warned = True  # it can be called
                end, lasted = await self._hold(found)
                if end is End.GOODBYE:
                    return
                if end is End.BROKEN:
                    await self._check(to, contact)
                pause = soon if lasted > CALL_AGAIN else pause
            elif found is not Found.BUSY:
                self._tell_once(to, contact)
            await asyncio.sleep(pause * jitter.uniform(0.5, 1.0))
            pause = min(2 * pause, CALL_AGAIN)

    async def _hold(self, link: _Link) -> tuple[End, float]:
        """Wait for the end of a link; how it ended, and after how many seconds."""
        loop, (reader, writer) = asyncio.get_running_loop(), link
        began = loop.time()
        try:
            end = End.GOODBYE if await reader.read(1) else End.BROKEN
        except OSError as error:
            end = _end_of(error)
        finally:
            _hang_up(writer)
        return end, loop.time() - began

    def _tell_once(self, to: Member, contact: Contact) -> None:
        where = (to.node, contact.addr, contact.port)
        text = "no proof of death: the coordinator, %s, can't be called at %s, port %d"
        log.log(logging.DEBUG if self._warned else logging.INFO, text, *where)
        self._warned = True

    # --- those who call

    def came(self, caller: _Caller) -> None:
        """Somebody has connected."""
        if len(self._strangers) < _STRANGERS:
            self._strangers.add(caller)
        else:
            caller.send_away()

    def greeted(self, caller: _Caller, nonce: bytes) -> Found:
        """Somebody has said hello; the answer, which is silence to who knows nothing."""
        self._strangers.discard(caller)
        if not _compare_digest(nonce, self._nonce):
            return Found.SILENT
        if caller.lease == _ASKING:
            return Found.HERE
        member = self._coordinated(caller.lease)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        full = 0 < files // 2 <= len(self._callers)  # workers and disks need some, too
        if member is None or full:
            return Found.BUSY
        older = self._callers.pop(caller.lease, None)
        if older:
            older.cut()
        self._callers[caller.lease] = caller
        if member.contact:
            self._tasks.create(self._call_back(caller, member, member.contact))
        return Found.HERE

    def ended(self, caller: _Caller, end: End) -> None:
        """A connection that was made to this agent is no more."""
        self._strangers.discard(caller)
        if self._callers.get(caller.lease) is not caller:
            return
        del self._callers[caller.lease]
        member = self._coordinated(caller.lease)
        if member and member.contact and caller.answers and not caller.over and end is End.BROKEN:
            self._tasks.create(self._check(member, member.contact))

    async def _call_back(self, caller: _Caller, member: Member, contact: Contact) -> None:
        """Find out whether a caller can be called: where a firewall refuses, nobody is dead."""
        pause = 1.0
        while not caller.over and self._callers.get(member.lease) is caller:
            async with self._back:
                caller.answers = await _ask_whether_there(contact) is Found.HERE
            if caller.answers:
                log.debug("%s would be missed at once", member.node)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, CALL_AGAIN)

    def _coordinated(self, lease: int) -> Member | None:
        """The member with this lease, where this agent is the coordinator and sees it."""
        view = self._view
        now = view.round if view else None
        if view is None or now is None or now.coordinator != self._lease:
            return None
        at = bisect_left(view.members, lease, key=attrgetter("lease"))
        found = view.members[at : at + 1]
        return found[0] if found and found[0].lease == lease else None

    # --- a link that broke

    async def _check(self, member: Member, contact: Contact) -> None:
        """Revoke a lease if its agent is gone, and if that is up to this agent, then and now."""
        if not self._in_charge_of(member):
            return
        if not await _is_gone(contact) or not self._in_charge_of(member):
            return
        where = (contact.addr, contact.port)
        text = "%s is dead: its connection has ended, and it is not at %s, port %d, any more"
        log.warning(text, member.node, *where)
        self._tasks.inbox.put(PeerDead(member.lease))
        try:
            await self._revoke(member.lease)
        except ElasticEtcdError as error:
            log.debug("the lease of %s is left to its end: %s", member.node, error)

    def _in_charge_of(self, member: Member) -> bool:
        view = self._view
        if view is None or view.coordinator is None or view.coordinator.lease != member.lease:
            return self._coordinated(member.lease) is not None
        part = view.part(self._lease)
        return part is not None and part.group_rank < _FIRST
