"""The links between a job's agents (elastic_etcd/agent/peer_links.py), as seen from outside."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from elastic_etcd.agent.peer_links import HELLO_FORM
from elastic_etcd.core.schema import Contact, Member, decode, unhexed
from tests.support.etcd import EtcdServer
from tests.support.job import Agent, Job
from tests.support.residue import keys


def members(etcd: EtcdServer, job: str) -> dict[str, Member]:
    """The members that there are, by node."""
    found = {}
    for key, value in keys(etcd, job).items():
        if key.startswith("members/"):
            lease = unhexed(key.partition("/")[2])
            found[value["node"]] = decode(Member, json.dumps(value), lease=lease)
    return found


def contact(member: Member) -> Contact:
    """Where its agent is called."""
    assert member.contact
    return member.contact


def connect(to: Contact) -> socket.socket:
    return socket.create_connection((to.addr, to.port), timeout=10)


def hello(to: Contact, lease: int) -> bytes:
    """What the member with this lease says first."""
    return HELLO_FORM.pack(bytes.fromhex(to.nonce), lease)


@contextmanager
def impostor(called: Member, named: Member) -> Iterator[socket.socket]:
    """A line to one agent in the name of another one, of somebody who can read etcd."""
    to = contact(called)
    with connect(to) as sock:
        sock.sendall(hello(to, named.lease))
        assert sock.recv(1)
        yield sock


def missed(job: Job, coordinator: Agent, *others: Agent, times: int = 1) -> None:
    """Wait until the coordinator has lines to the others, and has called them.

    It says so at the log level debug, once for each line.
    """
    for other in others:
        text = f"{other.node} would be missed at once"
        job.wait(text, lambda text=text: coordinator.output.count(text) >= times, 60)  # type: ignore[misc]


def nobody_is_dead(job: Job, agent: Agent, generation: int, seconds: float) -> None:
    """For so long the agent takes nobody for dead, and no generation begins."""

    def changed() -> bool:
        starts = job.events("start")
        return " is dead: " in agent.output or any(e.generation > generation for e in starts)

    assert not job._changes.wait(changed, seconds), job.account()
