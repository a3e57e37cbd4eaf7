"""This node's address for the others: what --advertise says, or that on its way to etcd.

All of it may wait for a name server, so it is found in a thread. An address of the loopback is no
address for other nodes; where there may be some, another one of this machine's is taken.
"""

import array
import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.errors import ElasticEtcdError, EtcdUnreachable, UsageError
from elastic_etcd.etcd.access import SOCKET
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import LOOK_UP

IP: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_RUNNING = 0x40  # as `operstate` of this very network namespace: up, or not known
_IFREQ = 40  # bytes of a struct ifreq: a name of 16, then a sockaddr
_MANY = 256
_UNUSABLE = 0x40 | 0x08  # IFA_F_TENTATIVE, IFA_F_DADFAILED
_GLOBAL = 0x00  # not of the link, nor of the host
# Reserved for documents, so that nothing but a default route leads there; nothing is sent.
_ANYWHERE = (("198.51.100.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Interface:
    """An address of this machine, and the interface that has it."""

    name: str
    ip: IP


@dataclass(frozen=True, slots=True)
class Reached:
    """This node as the others reach it; "" is not known."""

    address: str = ""
    interface: str = ""  # over which they come


async def own_address(config: AgentConfig, endpoint: str, before: Reached) -> Reached:
    """The address at which other nodes reach this one; `endpoint` is etcd's, in use now.

    If it can't be found out it is still the one from `before`, or what is advertised; without
    either that raises EtcdUnreachable or UsageError.
    """
    if config.advertise is not None and not before.address:
        before = Reached(advertised(config.advertise))
    several = config.etcd is not None and config.limits.max_nodes > 1
    find = partial(find_address, config.advertise, endpoint, several=several)
    try:
        return await in_thread(find, LOOK_UP)
    except TimeoutError:
        text = f"the name of etcd at {endpoint} was not looked up within {LOOK_UP:.0f} s.\n"
        error: ElasticEtcdError = EtcdUnreachable(f"{text}Check the resolver, or give --advertise.")
    except ElasticEtcdError as why:
        error = why
    if not before.address:
        raise error
    log.warning("this node's address is taken to be %s still: %s", before.address, error)
    return before


def find_address(advertise: str | None, endpoint: str, *, several: bool) -> Reached:
    """As `own_address`, waiting for the name server; `several` nodes may take part.

    The advertised one may be a name, or an address of a router's: then the others come over the
    interface on the way to etcd, as far as this machine can tell.
    """
    if advertise is None:
        address = _found(endpoint, several=several)
        return Reached(address, interface_of(address))
    address = advertised(advertise)
    interface = interface_of(address)
    if not interface:
        with suppress(EtcdUnreachable):
            interface = interface_of(_found(endpoint, several=several))
    return Reached(address, interface)


def _found(endpoint: str, *, several: bool) -> str:
    way = _way_to(endpoint)
    if not several or not ipaddress.ip_address(way.partition("%")[0]).is_loopback:
        return way
    return _reachable() or way


def advertised(text: str) -> str:
    """The address that --advertise means: of an interface, in a network, or the text itself.

    Raises UsageError when this machine has none such.
    """
    if "/" in text:
        network = ipaddress.ip_network(text, strict=False)
        found = [each.ip for each in interfaces() if each.ip in network]
        what = "no address in that network"
    elif text in (name for _, name in socket.if_nameindex()):
        found = [each.ip for each in interfaces() if each.name == text]
        what = "an interface without an address"
    else:
        return text
    if not found:
        here = ", ".join(f"{each.ip} ({each.name})" for each in interfaces())
        raise UsageError(f"--advertise {text}: {what}; this machine has {here or 'none'}")
    return str(found[0])


def interfaces() -> Iterator[Interface]:
    """This machine's addresses, IPv4 first, without those that are of one link only."""
    yield from _ipv4()
    with suppress(OSError):
        yield from _ipv6()


def interface_of(address: str) -> str:
    """The interface that has this address; "" for a name, or an address that is none of ours."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return next((each.name for each in interfaces() if each.ip == ip), "")


def is_link_up(interface: str) -> bool:
    """Whether an interface of this machine carries packets. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("16sH22x", interface.encode(), 0)
        _, flags = struct.unpack("16sH22x", fcntl.ioctl(probe, _SIOCGIFFLAGS, asked))
    return bool(flags & _IFF_RUNNING)


def _way_to(endpoint: str) -> str:
    """This machine's address on the way to `endpoint`."""
    if endpoint.startswith(SOCKET):
        return "127.0.0.1"
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EtcdUnreachable(
            f"no way to etcd at {endpoint} ({error.strerror}).\n"
            "Check --etcd and this machine's network, or give --advertise."
        ) from None


def _reachable() -> str:
    """An address that other machines may know: on the default route, or any; "" without one."""
    for address, family in _ANYWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    return next((str(each.ip) for each in interfaces() if not each.ip.is_loopback), "")


def _ipv4() -> Iterator[Interface]:
    buffer = array.array("B", bytes(_IFREQ * _MANY))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        asked = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        length, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, asked))
    for at in range(0, length, _IFREQ):
        entry = buffer[at : at + _IFREQ].tobytes()
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]  # eth0:1 is an alias
        yield Interface(name, ipaddress.IPv4Address(entry[20:24]))


def _ipv6() -> Iterator[Interface]:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        address, _, _, scope, flags, name = line.split()
        if int(scope, 16) == _GLOBAL and not int(flags, 16) & _UNUSABLE:
            yield Interface(name, ipaddress.IPv6Address(bytes.fromhex(address)))
