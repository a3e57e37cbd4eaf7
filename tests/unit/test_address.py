"""Which address a node tells the others, on the interfaces that this machine has."""

import asyncio
import ipaddress
import socket
import threading
from typing import Any

import pytest

from elastic_etcd.agent.address import (
    Reached,
    advertised,
    find_address,
    interface_of,
    interfaces,
    own_address,
)
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.schema import Limits
from elastic_etcd.errors import EtcdUnreachable, UsageError
from elastic_etcd.etcd.access import EtcdConfig

DEADLINE = 30.0
LOCAL = "127.0.0.1:2379"


def config(most: int = 2, *, embedded: bool = False, advertise: str | None = None) -> AgentConfig:
    etcd = None if embedded else EtcdConfig((LOCAL,))
    return AgentConfig(etcd, "j", ("t",), "n", 1, Limits(1, most), advertise=advertise)


def outside() -> str:
    """An address of this machine's that is not of the loopback."""
    found = [str(each.ip) for each in interfaces() if not each.ip.is_loopback]
    if not found:
        pytest.skip("this machine has only the loopback")
    return found[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1", "[::1]"])
async def test_r15_no_loopback_is_told_to_other_nodes(host: str) -> None:
    """127.0.1.1 is what Debian's /etc/hosts has for the machine's own name."""
    outside()
    reached = await own_address(config(), f"{host}:2379", Reached())
    assert not ipaddress.ip_address(reached.address).is_loopback


async def test_a_node_alone_stays_on_the_loopback() -> None:
    assert (await own_address(config(most=1), LOCAL, Reached())).address == "127.0.0.1"
    # An etcd of one's own listens there only, or at a socket in a directory.
    for own in (LOCAL, "unix:///tmp/etcd:0"):
        assert (await own_address(config(embedded=True), own, Reached())).address == "127.0.0.1"


async def test_r15_advertise_takes_an_interface_or_a_network() -> None:
    address = outside()
    (name,) = {each.name for each in interfaces() if str(each.ip) == address}
    for text in (name, f"{address}/32", address):
        assert await own_address(config(advertise=text), LOCAL, Reached()) == Reached(address, name)
    assert advertised("lo") == "127.0.0.1"
    assert advertised("127.0.0.0/8") == "127.0.0.1"
    assert advertised("node7.cluster") == "node7.cluster", "a name is what others look up"


def test_r15_advertise_has_to_be_there() -> None:
    with pytest.raises(
        UsageError, match=r"--advertise 203\.0\.113\.0/24: no .*127\.0\.0\.1 \(lo\)"
    ):
        advertised("203.0.113.0/24")


async def test_r15_a_name_server_that_does_not_answer_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop goes on: it is what lets this one answer at last."""
    answer, look_up = threading.Event(), socket.getaddrinfo

    def slow(*args: Any, **more: Any) -> Any:
        assert answer.wait(DEADLINE), "the loop did not turn"
        return look_up(*args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.get_running_loop().call_later(0.1, answer.set)
    assert (await own_address(config(most=1), LOCAL, Reached())).address == "127.0.0.1"


async def test_r15_a_name_server_that_never_answers_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(DEADLINE))
    monkeypatch.setattr("elastic_etcd.agent.address.LOOK_UP", 0.05)
    before = Reached("10.0.0.1", "eth7")
    assert await own_address(config(), LOCAL, before) == before
    assert await own_address(config(advertise="node7"), LOCAL, Reached()) == Reached("node7")
    with pytest.raises(EtcdUnreachable, match="--advertise"):
        await own_address(config(), LOCAL, Reached())
    answer.set()


def test_no_way_to_etcd_says_what_to_do() -> None:
    with pytest.raises(EtcdUnreachable, match="--advertise"):
        find_address(None, "no.such.host.invalid:2379", several=True)


@pytest.mark.parametrize(
    ("given", "name"), [("127.0.0.1", "lo"), ("node-1", ""), ("198.51.100.7", ""), ("", "")]
)
def test_g4_the_interface_of_an_address(given: str, name: str) -> None:
    assert interface_of(given) == name


@pytest.mark.parametrize("text", ["node7.cluster", "localhost", "203.0.113.9"])
async def test_g4_what_is_no_address_of_this_machine_is_reached_as_without_it(text: str) -> None:
    """gloo would take the machine's own name, which is 127.0.1.1 to Debian."""
    outside()
    found = await own_address(config(advertise=text), LOCAL, Reached())
    assert found == Reached(text, (await own_address(config(), LOCAL, Reached())).interface)
    assert found.interface not in ("", "lo")
