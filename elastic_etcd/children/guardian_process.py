"""The guardian's process: waits for the agent to end, then ends what the agent left behind.

`python -I -S guardian_process.py AGENT_PID LIFE [FIELDS]`, with a socket to the agent as standard
input. With FIELDS, an object in JSON, each line that it logs is one, which has these fields, too.
The first packet is what it takes to reach etcd, each later one what is true now: the lease, until
when workers may train (ms of CLOCK_BOOTTIME, 0: always), how many of the process groups train, and
the groups, those first. End of file means that the agent is gone. The kill comes first, and
whatever is costly to load (the etcd client) after it, so that waiting takes a bare interpreter's
memory and no more. Last it removes the agent's directories.
"""

import contextlib
import os
import select
import signal
import sys
import time

# ruff: noqa: PLC0415 - imports come late on purpose

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
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_RENEWS_NOTHING = "does not renew its lease: killed its workers (--when-cut-off stop)"


def main(agent: str, life: int) -> int:
    """Wait, then end the groups and the lease; the exit status is 0 if that went well.

    Whatever happens, it ends `life` seconds after the agent.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    etcd = os.read(0, PACKET)
    if not etcd:  # the agent has gone before it said anything
        return 0
    lease, groups = _follow_agent(agent)
    killed = [group for group in groups if _kill(group)]  # at once: a number is used again later
    signal.alarm(life)
    config, path, folders = _read_packet(etcd)
    if not (killed or lease):
        _remove(folders)
        return 0
    sys.path[:] = path
    import elastic_etcd.etcd.client  # noqa: F401 - while what was killed dies

    dying = _kill_the_rest(killed, str(config.pop("mark")))
    done = [f"killed what it ran{_still_there(dying)}"] if killed or dying else []
    problem = _revoke(config, lease) if lease else ""
    if lease:
        done.append(f"lease {lease:x} {'not revoked: ' + problem if problem else 'revoked'}")
    _say(f"the agent (pid {agent}) is gone: {', '.join(done)}")
    _remove(folders)
    _wait_for_ends(dying, life)  # another agent of this node waits for this process
    return 1 if problem else 0


def _follow_agent(agent: str) -> tuple[int, list[int]]:
    """Wait for the end of the agent; gives the lease and the groups that it had.

    Meanwhile kill what trains for longer than it may. News come first, because this process may
    have been stopped itself; and an agent that wakes up may start workers before it knows.
    """
    lease, training, groups, timer = 0, 0, list[int](), -1
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        if 0 not in dict(poll.poll()):
            os.read(timer, 8)
            killed = [group for group in groups[:training] if _kill(group)]
            if killed:
                _say(f"the agent (pid {agent}) {_RENEWS_NOTHING}")
            continue
        packet = os.read(0, PACKET)
        if not packet:
            return lease, groups
        lease, until, training, *groups = map(int, packet.split())
        if until and timer < 0:
            timer = _timer()
            poll.register(timer, select.POLLIN)
        if timer >= 0:
            _set(timer, until)


def _kill(group: int) -> bool:
    """SIGKILL to all of the group; whether there was any process in it."""
    try:
        with contextlib.suppress(PermissionError):  # for one member; the rest got the signal
            os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _say(text: str) -> None:
    """Write to standard error as the agent does; if that is stuck, the alarm is the end."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = f"elastic_etcd: {text}" if os.isatty(2) else f"{at} elastic_etcd: {text}"
    for fields in sys.argv[3:]:
        import json

        line = json.dumps({"time": at, "level": "warning", **json.loads(fields), "message": text})
    with contextlib.suppress(OSError):  # closed: nobody listens
        os.write(2, f"{line}\n".encode(errors="replace"))


def _timer() -> int:
    """A descriptor that is readable from the time on to which it is set."""
    import ctypes

    timer = ctypes.CDLL(None).timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC)
    assert isinstance(timer, int)
    assert timer >= 0, "timerfd_create"
    return timer


def _set(timer: int, at: int) -> None:
    """Set it to `at` ms of CLOCK_BOOTTIME; 0: never."""
    import ctypes

    when = (ctypes.c_long * 4)(0, 0, at // 1000, at % 1000 * 1_000_000)  # no interval, then s, ns
    ctypes.CDLL(None).timerfd_settime(timer, _ABSOLUTE, when, None)


def _read_packet(packet: bytes) -> tuple[dict[str, object], list[str], list[str]]:
    """The agent's EtcdConfig as a dictionary, its `sys.path`, and its directories."""
    import json

    config: dict[str, object] = json.loads(packet)
    path, folders = config.pop("path"), config.pop("folders")
    assert isinstance(path, list)
    assert isinstance(folders, list)
    return config, path, folders


def _remove(folders: list[str]) -> None:
    import shutil
    from pathlib import Path

    for folder in filter(None, folders):  # "": there is none, or it is to be kept
        if not any(Path(folder).glob("generation_*/*/hang.txt")):
            shutil.rmtree(folder, ignore_errors=True)


def _kill_the_rest(groups: list[int], mark: str) -> set[int]:
    """Kill also what has left the groups; gives pidfds of all that is dying."""
    from elastic_etcd.system.leftovers import kill_marked
    from elastic_etcd.system.processes import kill_members

    leftovers = kill_marked(mark) if mark else []
    return {*leftovers, *(pidfd for pidfds in kill_members(groups).values() for pidfd in pidfds)}


def _still_there(dying: set[int]) -> str:
    """Wait a moment until they are gone; what to say if that takes longer."""
    from elastic_etcd.times import GUARD_GONE

    _wait_for_ends(dying, GUARD_GONE)
    return f" ({len(dying)} processes are still dying)" if dying else ""


def _wait_for_ends(dying: set[int], seconds: float) -> None:
    """Wait for the ends of `dying`, and take those that have ended out of it."""
    import select
    import time

    deadline = time.monotonic() + seconds
    poll = select.poll()
    for pidfd in dying:
        poll.register(pidfd, select.POLLIN)
    while dying and (left := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left * 1000):
            poll.unregister(pidfd)
            dying.remove(pidfd)


def _revoke(config: dict[str, object], lease: int) -> str:
    """Revoke at all endpoints at once, the first answer counts; "" or why it failed."""
    import asyncio
    from typing import Any, cast

    from elastic_etcd.errors import ElasticEtcdError
    from elastic_etcd.etcd.access import EtcdConfig
    from elastic_etcd.etcd.client import Client
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
