"""What the end of a link proves, and what it does not, between one agent and others at its ends."""

import asyncio
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.inbox import Inbox, Tasks
from elastic_etcd.agent.peer_links import HELLO_FORM, PeerLinks
from elastic_etcd.core.lifecycle import PeerDead
from elastic_etcd.core.schema import Contact, Ledger, Master, Member, Participant, Phase, Round
from elastic_etcd.core.view import Everything, View
from elastic_etcd.times import CALL_AGAIN, PROOF

OWN, OTHER, THIRD = 0xA, 0xB, 0xC
HOME = "127.0.0.1"
NONCE = "0" * 32
HERE, BUSY, GOODBYE = b"\x06", b"\x15", b"\x04"
CUT = b"cut"  # a peer that has no place for who calls: its kernel sends a reset


class Etcd:
    """Leases that are revoked, as an agent asks for."""

    def __init__(self) -> None:
        self.revoked: list[int] = []
        self.news = asyncio.Event()

    async def revoke(self, lease: int) -> None:
        self.revoked.append(lease)
        self.news.set()


class Peer:
    """Another agent's end, which can die: its kernel then closes all that it has."""

    def __init__(self, answer: bytes = HERE) -> None:
        self.hellos: list[bytes] = []
        self.heard = asyncio.Event()
        self.dies = False  # with the next call that is cut
        self._answer = answer
        self._open: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._port = 0

    async def listen(self) -> Contact:
        self._server = await asyncio.start_server(self._called, HOME, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return Contact(HOME, self._port, NONCE)

    async def call(self, contact: Contact, lease: int, answer: bytes = HERE) -> None:
        """Have a link there, in the name of a member."""
        reader, writer = await asyncio.open_connection(contact.addr, contact.port)
        self._open.append(writer)
        writer.write(HELLO_FORM.pack(bytes.fromhex(contact.nonce), lease))
        assert await reader.read(1) == answer

    def say(self, text: bytes) -> None:
        for writer in self._open:
            writer.write(text)

    def hang_up(self) -> None:
        for writer in self._open:
            writer.close()
        self._open.clear()

    def stop_listening(self) -> None:
        if self._server:
            self._server.close()

    def die(self) -> None:
        self.stop_listening()
        self.hang_up()

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        if self._answer == CUT:
            writer.transport.abort()  # with the hello unread: a reset
            if self.dies:
                self.stop_listening()
        else:
            self.hellos.append(await reader.readexactly(HELLO_FORM.size))
            writer.write(self._answer)
        self.heard.set()


def view(coordinator: int, *others: Member, ranks: tuple[int, ...] = (OWN, OTHER)) -> View:
    """A final round of members, as its coordinator sees it."""
    world = tuple(Participant(lease, f"n{lease:x}", 1, n, n) for n, lease in enumerate(ranks))
    size = len(world)
    now = Round(1, Phase.FINAL, coordinator, "r", "run", "n", size, size, Master(HOME, 1))
    members = tuple(sorted((Member(OWN, "own", 1), *others), key=lambda m: m.lease))
    leader = next(m for m in members if m.lease == coordinator)
    return View(
        1,
        Everything(),
        now,
        ledger=Ledger(1, 1, size),
        coordinator=leader,
        members=members,
        world=world,
    )


class Stage:
    """The links of an agent, as the member OWN, and the peers that a test makes."""

    def __init__(self, links: PeerLinks, own: Contact, etcd: Etcd, inbox: Inbox) -> None:
        self.links, self.own, self.etcd, self.inbox = links, own, etcd, inbox
        self.peers: list[Peer] = []

    def peer(self, answer: bytes = HERE) -> Peer:
        self.peers.append(Peer(answer))
        return self.peers[-1]


@asynccontextmanager
async def agent() -> AsyncIterator[Stage]:
    """Links of the member OWN, where they can be called, and what they revoke."""
    etcd = Etcd()
    async with asyncio.timeout(30), Tasks() as tasks:
        links = PeerLinks(tasks, etcd.revoke)
        own = await links.open(HOME)
        assert own
        stage = Stage(links, own, etcd, tasks.inbox)
        try:
            yield stage
        finally:
            links.close()
            for peer in stage.peers:
                peer.die()
            await asyncio.sleep(0.05)  # for the loop to close what was closed


async def nothing_follows(etcd: Etcd) -> None:
    """In twice the time that a check may take nobody's lease is revoked."""
    with suppress(TimeoutError):
        await asyncio.wait_for(etcd.news.wait(), 2 * PROOF)
    assert not etcd.revoked


async def test_a_link_that_ends_of_an_agent_that_is_gone() -> None:
    async with agent() as stage:
        peer = stage.peer()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=await peer.listen())), OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()  # it is called back, as the check later
        peer.die()
        await stage.etcd.news.wait()
        assert stage.etcd.revoked == [OTHER]
        assert await stage.inbox.get() == PeerDead(OTHER)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400", BUSY, CUT])
@pytest.mark.parametrize("coordinates", [True, False])
async def test_m13_only_a_refused_call_is_a_proof(coordinates: bool, answer: bytes) -> None:
    """Not one that is taken, and then cut, answered by somebody else, or not at all."""
    async with agent() as stage:
        peer = stage.peer()
        contact = await peer.listen()
        leader = OWN if coordinates else OTHER
        stage.links.follow(view(leader, Member(OTHER, "n", 1, contact=contact)), OWN)
        if coordinates:
            await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        await asyncio.sleep(0.05)  # for its answer to be read
        peer.heard.clear()
        peer._answer = answer
        peer.hang_up()
        await peer.heard.wait()
        await nothing_follows(stage.etcd)


async def test_m13_a_kernel_may_take_one_more_call_of_a_dead_agent() -> None:
    """It ends the link first, and what the agent has listened at a moment later."""
    async with agent() as stage:
        peer = stage.peer()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=await peer.listen())), OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        await asyncio.sleep(0.05)  # for its answer to be read
        peer._answer, peer.dies = CUT, True
        peer.hang_up()
        await stage.etcd.news.wait()
        assert stage.etcd.revoked == [OTHER]


async def test_m13_a_loop_that_stood_still_proves_nothing() -> None:
    """At each of the turns that a check takes."""
    async with agent() as stage:
        peer = stage.peer()
        contact = await peer.listen()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=contact)), OWN)
        for turns in range(12):
            peer.heard.clear()
            await peer.call(stage.own, OTHER)
            await peer.heard.wait()
            await asyncio.sleep(0.05)  # for its answer to be read
            peer.hang_up()
            for _ in range(turns):
                await asyncio.sleep(0)
            time.sleep(PROOF + 0.05)  # noqa: ASYNC251 - it is what is tested
            await asyncio.sleep(0.02)
        await nothing_follows(stage.etcd)


async def test_m13_a_node_without_a_place_says_so_and_keeps_those_that_it_has() -> None:
    """Strangers who say nothing are no reason to send an older caller away."""
    async with agent() as stage, AsyncExitStack() as stack:
        stage.links.follow(view(OWN, Member(OTHER, "n", 1)), OWN)
        to = stage.own
        first, *silent = [await asyncio.open_connection(to.addr, to.port) for _ in range(64)]
        for _, writer in (first, *silent):
            stack.callback(writer.close)
        late, writer = await asyncio.open_connection(to.addr, to.port)
        stack.callback(writer.close)
        assert await late.read() == BUSY
        first[1].write(HELLO_FORM.pack(bytes.fromhex(to.nonce), OTHER))
        assert await first[0].read(1) == HERE


async def test_m10_a_call_for_which_no_descriptor_is_free_is_taken_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """asyncio told of it by a hundred tracebacks."""
    caplog.set_level(logging.DEBUG)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Tasks() as tasks, AsyncExitStack() as held:
        links = PeerLinks(tasks, Etcd().revoke)
        contact = await links.open("127.0.0.1")
        assert contact
        held.callback(links.close)
        caller = held.enter_context(socket.socket())
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            with suppress(OSError):
                while True:  # until none is left
                    held.callback(os.close, os.dup(0))
            caller.connect((contact.addr, contact.port))
            async with asyncio.timeout(10):
                while "out of system resource" not in caplog.text:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert all(record.levelno < logging.INFO for record in caplog.records)
        async with asyncio.timeout(10):
            while not links._strangers:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)


async def test_m13_links_that_a_network_has_cut_are_soon_there_again() -> None:
    """Also those of members that are not in charge of the coordinator."""
    async with agent() as stage:
        coordinator = stage.peer()
        leader = Member(OTHER, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(OTHER, leader, ranks=(OTHER, THIRD, OWN)), OWN)
        await coordinator.heard.wait()
        coordinator.heard.clear()
        coordinator.hang_up()
        async with asyncio.timeout(CALL_AGAIN / 4):
            await coordinator.heard.wait()
        assert coordinator.hellos[1:] == [HELLO_FORM.pack(bytes.fromhex(NONCE), OWN)]


@pytest.mark.parametrize("text", [GOODBYE, b"anything else"])
async def test_a_link_that_something_was_said_on(text: bytes) -> None:
    async with agent() as stage:
        peer = stage.peer()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=await peer.listen())), OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        peer.say(text)
        peer.die()
        await nothing_follows(stage.etcd)


async def test_an_agent_that_answers() -> None:
    async with agent() as stage:
        peer = stage.peer()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=await peer.listen())), OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        peer.heard.clear()
        peer.hang_up()
        await peer.heard.wait()
        await nothing_follows(stage.etcd)


async def test_an_agent_that_a_firewall_hides() -> None:
    """It was never reached, so that a refusal shows nothing."""
    async with agent() as stage:
        peer = stage.peer()
        contact = await peer.listen()
        peer.stop_listening()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=contact)), OWN)
        await peer.call(stage.own, OTHER)
        peer.die()
        await nothing_follows(stage.etcd)


async def test_an_agent_that_takes_a_call_and_says_nothing() -> None:
    async with agent() as stage:
        peer = stage.peer()
        contact = await peer.listen()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=contact)), OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        peer._answer = b""
        peer.hang_up()
        await nothing_follows(stage.etcd)


async def test_an_agent_that_may_not_write_revokes_nothing() -> None:
    """It has seen a key of a newer format version."""
    async with agent() as stage:
        peer = stage.peer()
        seen = view(OWN, Member(OTHER, "n", 1, contact=await peer.listen()))
        stage.links.follow(seen, OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        stage.links.follow(replace(seen, newer=2), OWN)
        peer.die()
        await nothing_follows(stage.etcd)


async def test_m13_a_lease_that_is_no_member_s_takes_no_place() -> None:
    async with agent() as stage:
        peer = stage.peer()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=await peer.listen())), OWN)
        await peer.call(stage.own, THIRD, BUSY)
        assert not stage.links._callers
        peer.die()
        await nothing_follows(stage.etcd)


async def test_who_does_not_coordinate_revokes_no_caller() -> None:
    async with agent() as stage:
        peer, coordinator = stage.peer(), stage.peer()
        known = Member(OTHER, "n", 1, contact=await peer.listen())
        leader = Member(THIRD, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(THIRD, known, leader), OWN)
        await peer.call(stage.own, OTHER, BUSY)
        peer.die()
        await nothing_follows(stage.etcd)


@pytest.mark.parametrize(
    ("ranks", "revokes"),
    [((OTHER, OWN, THIRD), True), ((OWN, OTHER, THIRD), True), ((OTHER, THIRD, OWN), False)],
    ids=["rank 1", "rank 0", "rank 2"],
)
async def test_the_coordinator_is_gone(ranks: tuple[int, ...], revokes: bool) -> None:
    async with agent() as stage:
        coordinator = stage.peer()
        leader = Member(OTHER, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(OTHER, leader, ranks=ranks), OWN)
        await coordinator.heard.wait()
        assert coordinator.hellos == [HELLO_FORM.pack(bytes.fromhex(NONCE), OWN)]
        coordinator.die()
        if revokes:
            await stage.etcd.news.wait()
            assert stage.etcd.revoked == [OTHER]
        else:
            await nothing_follows(stage.etcd)


async def test_a_coordinator_that_says_goodbye_is_not_called_again() -> None:
    async with agent() as stage:
        coordinator = stage.peer()
        leader = Member(OTHER, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(OTHER, leader), OWN)
        await coordinator.heard.wait()
        coordinator.say(GOODBYE)
        coordinator.hang_up()
        await nothing_follows(stage.etcd)
        assert len(coordinator.hellos) == 1


async def test_a_link_that_breaks_again_and_again_is_left_longer_each_time() -> None:
    async with agent() as stage:
        coordinator = stage.peer()
        leader = Member(OTHER, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(OTHER, leader), OWN)
        for _ in range(2):
            await coordinator.heard.wait()
            coordinator.heard.clear()
            coordinator.hang_up()
            await coordinator.heard.wait()  # it is asked at once
            coordinator.heard.clear()
        await nothing_follows(stage.etcd)
        asked = [HELLO_FORM.unpack(hello)[1] for hello in coordinator.hellos]
        assert asked == [OWN, 0, OWN, 0]


async def test_another_coordinator_is_called_in_its_place() -> None:
    """Also within a generation; the one before is said goodbye to."""
    async with agent() as stage:
        first, second = stage.peer(), stage.peer()
        one = Member(OTHER, "c", 1, contact=await first.listen())
        two = Member(THIRD, "d", 1, contact=await second.listen())
        stage.links.follow(view(OTHER, one, two), OWN)
        await first.heard.wait()
        stage.links.follow(view(THIRD, one, two), OWN)
        await second.heard.wait()
        first.die()
        await nothing_follows(stage.etcd)


async def test_who_knows_an_old_nonce_is_not_heard() -> None:
    async with agent() as stage:
        later = await stage.links.open(HOME)
        assert later
        assert later.nonce != stage.own.nonce
        reader, writer = await asyncio.open_connection(later.addr, later.port)
        writer.write(HELLO_FORM.pack(bytes.fromhex(stage.own.nonce), OTHER))
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


@pytest.mark.parametrize("address", ["192.0.2.77", "no-such-name.invalid"])
async def test_a_node_that_can_not_listen_at_its_address_has_no_links(address: str) -> None:
    """Behind NAT, say; all interfaces instead would be more than it was told."""
    async with Tasks() as tasks:
        links = PeerLinks(tasks, Etcd().revoke)
        assert await links.open(address) is None
        links.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_an_ipv4_address_may_be_written_as_one_of_ipv6() -> None:
    async with Tasks() as tasks:
        links = PeerLinks(tasks, Etcd().revoke)
        assert await links.open(f"::ffff:{HOME}")
        links.close()
