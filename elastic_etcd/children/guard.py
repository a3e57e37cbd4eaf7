"""The guardian's process: waits for the agent to end, then ends what the agent left behind.

`python -I -S guard.py AGENT_PID LIFE`, with a socket to the agent as standard input. The first
packet is what it takes to reach etcd, each later one the lease and the process groups as they are
now; end of file means that the agent is gone. The kill comes first, and whatever is costly to load
(the etcd client) after it, so that waiting takes a bare interpreter's memory and no more.
"""

import contextlib
import os
import signal
import sys

# What a terminal, a shell or a service manager sends to everything that belongs to the agent.
IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
PACKET = 1 << 18


def main(agent: str, life: int) -> int:
    """Wait, then end the groups and the lease; the exit status is 0 if that went well.

    Whatever happens, it ends `life` seconds after the agent.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    etcd = os.read(0, PACKET)
    lease, groups = 0, list[int]()
    while packet := os.read(0, PACKET):
        lease, *groups = map(int, packet.split())
    killed = [group for group in groups if _kill(group)]  # at once: a number is used again later
    signal.alarm(life)
    if not (killed or lease):
        return 0
    config = _load(etcd)
    done = [f"killed what it ran{_still_there(killed)}"] if killed else []
    problem = _revoke(config, lease) if lease else ""
    if lease:
        done.append(f"lease {lease:x} {'not revoked: ' + problem if problem else 'revoked'}")
    _say(f"elastic_etcd: the agent (pid {agent}) is gone: {', '.join(done)}\n")
    return 1 if problem else 0


def _kill(group: int) -> bool:
    """SIGKILL to all of the group; whether there was any process in it."""
    try:
        with contextlib.suppress(PermissionError):  # for one member; the rest got the signal
            os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _say(text: str) -> None:
    """To the agent's standard error; if that is stuck, the alarm is the end."""
    with contextlib.suppress(OSError):  # closed: nobody listens
        os.write(2, text.encode(errors="replace"))


# ruff: noqa: PLC0415  (imports below this line come late on purpose)


def _load(packet: bytes) -> dict[str, object]:
    """The agent's EtcdConfig as a dictionary; imports the client while what was killed dies."""
    import json

    config: dict[str, object] = json.loads(packet)
    path = config.pop("path")
    assert isinstance(path, list)
    sys.path[:] = path
    import elastic_etcd.etcd.client  # noqa: F401

    return config


def _still_there(groups: list[int]) -> str:
    """Wait until nothing runs in the groups any more; what to say if that takes too long."""
    import select
    import time

    from elastic_etcd.process import kill_members
    from elastic_etcd.times import GUARD_GONE

    deadline = time.monotonic() + GUARD_GONE
    dying = {pidfd for pidfds in kill_members(groups).values() for pidfd in pidfds}
    poll = select.poll()
    for pidfd in dying:
        poll.register(pidfd, select.POLLIN)
    while dying and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            dying.remove(pidfd)
    return f" ({len(dying)} processes are still dying)" if dying else ""


def _revoke(config: dict[str, object], lease: int) -> str:
    """Revoke at all endpoints at once, the first answer counts; "" or why it failed."""
    import asyncio
    from typing import Any, cast

    from elastic_etcd.errors import ElasticEtcdError
    from elastic_etcd.etcd.client import Client
    from elastic_etcd.etcd.config import EtcdConfig
    from elastic_etcd.times import GUARD_REVOKE

    async def at(endpoint: str) -> str:
        one = {**config, "endpoints": (endpoint,)}
        client = Client(EtcdConfig(**cast("dict[str, Any]", one)))
        try:
            await client.revoke(lease, GUARD_REVOKE)
        except ElasticEtcdError as error:
            return str(error)
        return ""

    async def everywhere() -> str:
        problem = ""
        endpoints = cast("list[str]", config["endpoints"])
        for answer in asyncio.as_completed([at(endpoint) for endpoint in endpoints]):
            problem = await answer
            if not problem:
                break
        return problem

    return asyncio.run(everywhere())


if __name__ == "__main__":
    os._exit(main(sys.argv[1], int(sys.argv[2])))  # gRPC's own end would take longer than the rest
