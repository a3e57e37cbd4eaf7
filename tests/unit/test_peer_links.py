"""What the end of a link proves, and what it does not, between one agent and others at its ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.inbox import Tasks
from elastic_etcd.agent.peer_links import HELLO_FORM, PeerLinks
from elastic_etcd.core.schema import Contact, Ledger, Master, Member, Participant, Phase, Round
from elastic_etcd.core.view import Everything, View
from elastic_etcd.times import PROOF

OWN, OTHER, THIRD = 0xA, 0xB, 0xC
HOME = "127.0.0.1"
NONCE = "0" * 32
HERE, GOODBYE = b"\x06", b"\x04"


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
        self._answer = answer
        self._open: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._port = 0

    async def listen(self) -> Contact:
        self._server = await asyncio.start_server(self._called, HOME, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return Contact(HOME, self._port, NONCE)

    async def call(self, contact: Contact, lease: int) -> None:
        """Have a link there, in the name of a member."""
        reader, writer = await asyncio.open_connection(contact.addr, contact.port)
        self._open.append(writer)
        writer.write(HELLO_FORM.pack(bytes.fromhex(contact.nonce), lease))
        assert await reader.read(1) == HERE

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

    def __init__(self, links: PeerLinks, own: Contact, etcd: Etcd) -> None:
        self.links, self.own, self.etcd = links, own, etcd
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
        stage = Stage(links, own, etcd)
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


async def test_another_program_has_its_port() -> None:
    async with agent() as stage:
        peer, stranger = stage.peer(), stage.peer(b"HTTP/1.1 400")
        contact = await peer.listen()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=contact)), OWN)
        await peer.call(stage.own, OTHER)
        await peer.heard.wait()
        peer.stop_listening()
        stranger._port = contact.port
        await stranger.listen()
        peer.hang_up()
        await stage.etcd.news.wait()
        assert stage.etcd.revoked == [OTHER]


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


async def test_a_member_that_nobody_knows() -> None:
    async with agent() as stage:
        peer = stage.peer()
        stage.links.follow(view(OWN, Member(OTHER, "n", 1, contact=await peer.listen())), OWN)
        await peer.call(stage.own, THIRD)
        peer.die()
        await nothing_follows(stage.etcd)


async def test_who_does_not_coordinate_revokes_no_caller() -> None:
    async with agent() as stage:
        peer, coordinator = stage.peer(), stage.peer()
        known = Member(OTHER, "n", 1, contact=await peer.listen())
        leader = Member(THIRD, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(THIRD, known, leader), OWN)
        await peer.call(stage.own, OTHER)
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


async def test_a_link_that_breaks_again_and_again_is_left_for_a_while() -> None:
    async with agent() as stage:
        coordinator = stage.peer()
        leader = Member(OTHER, "c", 1, contact=await coordinator.listen())
        stage.links.follow(view(OTHER, leader), OWN)
        for _ in range(2):
            await coordinator.heard.wait()
            coordinator.heard.clear()
            coordinator.hang_up()
        await nothing_follows(stage.etcd)
        assert len(coordinator.hellos) == 2


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
