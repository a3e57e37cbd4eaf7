"""The memory of the last commits, as an agent counts and publishes it."""

import os
from typing import Any

from elastic_etcd.agent.channel import ChannelServer
from elastic_etcd.agent.followers.held_memory import HeldMemory
from elastic_etcd.core.lifecycle import State, Tick
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import CommitMemory, Keys, decode
from elastic_etcd.core.txn import Put, Txn
from elastic_etcd.system.memfds import new_memfd


class Counted:
    """Stands for the node's workers: their memory."""

    found = (0, 0, 0)

    def bytes_held(self) -> tuple[int, int, int]:
        return self.found


async def test_it_is_published_when_it_changes() -> None:
    told: list[CommitMemory] = []

    async def publish(txn: Txn) -> bool:
        (put,) = txn.then
        assert isinstance(put, Put)
        assert put.lease == 0xA
        told.append(decode(CommitMemory, put.value, lease=put.lease))
        return True

    workers: Any = Counted()
    tasks: Any = None
    follower = HeldMemory(Keys("/elastic_etcd/j"), workers, tasks)
    follower.publish = publish  # type: ignore[method-assign]
    state = State(Local("r", 0xA, running=1), 1)
    follower.see(state, Tick(), state)
    for workers.found in ((0, 0, 0), (9, 0, 0), (9, 0, 0), (9, 8, 2), (0, 0, 0)):
        await follower.look()
    assert [(held.own, held.copies, held.nodes) for held in told] == [
        *((9, 0, 0), (9, 8, 2), (0, 0, 0))
    ]


def test_an_agent_counts_what_it_keeps_and_what_workers_share() -> None:
    server = ChannelServer(lambda *_: None)
    for name, size in (("state0.0", 1), ("state0.node0", 2), ("shards0.copy0.1", 4)):
        fd = new_memfd("test")
        os.write(fd, bytes(size << 20))
        if "node" in name:
            server.share(0, name, fd)
        else:
            server.keep(0, name, fd)
    assert server.bytes_held() == (3 << 20, 4 << 20)
    server.close()
