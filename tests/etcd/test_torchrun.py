"""The rendezvous handler for torch's own agent, called as that agent calls it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from elastic_etcd.__main__ import main
from elastic_etcd.plugin.torchrun import NAME, EtcdV3Handler, etcd_v3
from elastic_etcd.protocol.messages import Wanted
from tests.support.etcd import EtcdServer
from tests.support.processes import MARK, command, marked, send
from tests.support.tls import Authority, asking, shows

pytestmark = pytest.mark.timeout(600)

# The function's workers are forked from, or spawned by, the process that the handler is in.
PROGRAM = """
import os, sys, time
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def times(factor):
    return factor * int(os.environ["RANK"])

def wait():
    print("waits", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    _, method, endpoint, prefix = sys.argv
    config = dict(rdzv_backend="etcd-v3", rdzv_endpoint=endpoint, start_method=method)
    config |= dict(rdzv_configs={"prefix": prefix, "settle": 0}, min_nodes=1, max_nodes=1)
    two = LaunchConfig(nproc_per_node=2, run_id="two", **config)
    print(sorted(elastic_launch(two, times)(3).items()), flush=True)
    elastic_launch(LaunchConfig(nproc_per_node=1, run_id="one", **config), wait)()
"""

Nodes = Callable[..., EtcdV3Handler]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def nodes(etcd: EtcdServer, prefix: str, pool: ThreadPoolExecutor) -> Iterator[Nodes]:
    """Makes a node's handler; at the end all of them leave."""
    made: list[EtcdV3Handler] = []

    def make(name: str, least: int = 1, most: int = 3, **more: Any) -> EtcdV3Handler:
        conf = {"prefix": prefix, "node_name": name, "settle": "1", "join_settle": "0.2"} | more
        endpoint, job = conf.pop("endpoint", etcd.endpoint), conf.pop("job", "j")
        made.append(etcd_v3()(RendezvousParameters(NAME, endpoint, job, least, most, **conf)))
        return made[-1]

    yield make
    list(pool.map(fail, made))


def world(pool: ThreadPoolExecutor, *handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """All of them meet in one world, begun as often as torch's agent would."""

    def meet(handler: RendezvousHandler) -> RendezvousInfo:
        while (info := handler.next_rendezvous()).world_size < len(handlers):
            told(handler)
        return info

    found = list(pool.map(meet, handlers, timeout=120))
    assert sorted(info.rank for info in found) == list(range(len(handlers)))
    assert {info.world_size for info in found} == {len(handlers)}
    starts = [info.bootstrap_store_info for info in found]
    assert len({(start.master_addr, start.master_port) for start in starts}) == 1
    found[0].store.set("key", b"value")
    assert all(info.store.get("key") == b"value" for info in found)
    assert not any(handler.num_nodes_waiting() for handler in handlers)
    stores = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if accepts(fd)]
    assert stores
    assert not any(os.get_inheritable(fd) for fd in stores), "a worker would keep its port"
    return found


def accepts(fd: Path) -> bool:
    """Whether others connect to this descriptor."""
    with suppress(OSError):
        if str(fd.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(fd.name))) as found:
                return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def told(*handlers: RendezvousHandler) -> None:
    """All of them are to begin their workers anew."""
    until(lambda: all(each.num_nodes_waiting() for each in handlers))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nodes_come_fail_and_go(nodes: Nodes, pool: ThreadPoolExecutor) -> None:
    n1, n2, n3 = nodes("n1"), nodes("n2"), nodes("n3")
    world(pool, n1, n2)
    joining = pool.submit(n3.next_rendezvous)
    told(n1, n2)
    begun = [pool.submit(each.next_rendezvous) for each in (n1, n2)]
    assert {each.result(120).world_size for each in (joining, *begun)} == {3}
    failed = pool.submit(n1.next_rendezvous)  # unasked: its workers have failed
    told(n2, n3)
    begun = [pool.submit(each.next_rendezvous) for each in (n2, n3)]
    assert {each.result(120).world_size for each in (failed, *begun)} == {3}
    fail(n3)
    told(n1, n2)
    world(pool, n1, n2)


def test_a_torchrun_that_ends_while_it_is_to_stop_its_workers_leaves(
    nodes: Nodes, pool: ThreadPoolExecutor
) -> None:
    n1, n2, n3 = nodes("n1"), nodes("n2"), nodes("n3")
    world(pool, n1, n2)
    joining = pool.submit(n3.next_rendezvous)
    told(n1, n2)
    fail(n2)
    begun = pool.submit(n1.next_rendezvous)
    assert [each.result(120).world_size for each in (begun, joining)] == [2, 2]


def test_who_is_to_leave_ends_as_an_agent_of_ours_does(
    nodes: Nodes, pool: ThreadPoolExecutor, etcd: EtcdServer, prefix: str
) -> None:
    """And not by an error of torch's, which would say that the job is over."""
    n1, n2 = nodes("n1"), nodes("n2")
    world(pool, n1, n2)
    assert n2._agent
    n2._agent._process.send_signal(signal.SIGUSR2)
    leaves(n2)
    told(n1)
    assert pool.submit(n1.next_rendezvous).result(120).world_size == 1
    assert main(["stop", "j", "--etcd", etcd.endpoint, "--prefix", prefix]) == 0
    leaves(n1)


def leaves(node: RendezvousHandler) -> None:
    """Its node is told, and leaves the job by itself."""
    told(node)
    with pytest.raises(SystemExit) as end:
        node.next_rendezvous()
    assert end.value.code == 128 + signal.SIGTERM


def test_a_node_whose_workers_have_succeeded_takes_no_part_in_what_the_others_do(
    nodes: Nodes, pool: ThreadPoolExecutor
) -> None:
    """It waits for them in torch's barrier at the end."""
    n1, n2 = nodes("n1"), nodes("n2")
    first, _ = world(pool, n1, n2)
    first.store.add("torchelastic/agent/terminal_state/num_members", 1)
    time.sleep(1)
    assert pool.submit(n2.next_rendezvous).result(120).world_size == 1, "its workers have failed"
    for done in [pool.submit(each.shutdown) for each in (n1, n2)]:
        assert done.result(60)
    with pytest.raises(SystemExit):
        nodes("n3").next_rendezvous()


def test_a_world_whose_store_answers_nobody_is_left_with_its_leader(
    nodes: Nodes, pool: ThreadPoolExecutor
) -> None:
    """torch waits two minutes for a store that accepts a connection and says nothing."""
    n1, n2 = nodes("n1"), nodes("n2")
    first, _ = world(pool, n1, n2)
    leader, other = (n1, n2) if first.rank == 0 else (n2, n1)
    agent = leader._agent
    assert agent is not None
    agent.send(Wanted())  # its torchrun does not read of the world that follows
    begun = pool.submit(other.next_rendezvous)
    until(agent.has_news)
    time.sleep(2)
    assert not begun.done()
    fail(leader)
    assert begun.result(50).world_size == 1


def fail(handler: RendezvousHandler) -> None:
    """As torchrun ends whose workers have failed too often."""
    with suppress(ZeroDivisionError):
        try:
            _ = 1 / 0
        finally:
            handler.shutdown()


def test_an_agent_that_is_killed_is_a_lost_node_and_comes_back(
    nodes: Nodes, pool: ThreadPoolExecutor, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, prefix)
    n1, n2 = nodes("n1"), nodes("n2")
    world(pool, n1, n2)
    agents = [pid for pid in marked(prefix) if "--node-name=n1" in command(pid).split()]
    send(signal.SIGKILL, agents)
    assert agents
    told(n1, n2)
    world(pool, n1, n2)


def test_a_job_that_has_succeeded_is_run_again_only_if_asked(
    nodes: Nodes, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    n1, n2 = nodes("n1"), nodes("n2")
    world(pool, n1, n2)
    for done in [pool.submit(each.shutdown) for each in (n1, n2)]:
        assert done.result(60)
    with pytest.raises(SystemExit) as end:
        nodes("n3").next_rendezvous()
    assert end.value.code == 0
    again = nodes("n3", rerun="true")
    world(pool, again)
    fail(again)
    said = capfd.readouterr().err
    assert "torchrun: --rdzv-conf rerun=true) runs it again" in said
    assert "torchrun has ended: leaving" in said
    assert "SIGTERM" not in said


def test_an_etcd_with_certificates_and_users(
    own_etcd: EtcdServer, tmp_path: Path, prefix: str, nodes: Nodes, pool: ThreadPoolExecutor
) -> None:
    own_etcd.start()
    own_etcd.guard(prefix)
    own_etcd.kill()
    authority, password = Authority(tmp_path, "authority"), tmp_path / "password"
    own_etcd.arguments += (*shows(authority.issue("server")), *asking(authority))
    own_etcd.scheme = "https"
    own_etcd.start()
    password.write_text("mine\n")
    client = authority.issue("client")
    conf = {"cacert": authority.cacert, "cert": client.cert, "key": client.key}
    conf |= {"user": "me", "password_file": str(password), "endpoint": own_etcd.endpoint}
    world(pool, nodes("n1", **conf), nodes("n2", **conf))


@pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly(part="jobs"))]
)
def test_a_program_of_torchs_own_that_forks_or_spawns(
    etcd: EtcdServer, prefix: str, tmp_path: Path, method: str
) -> None:
    """It gets its values; when it is killed its agent leaves, whatever workers have of it.

    Its stderr is closed, as a daemon's may be.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    python = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable]
    program = subprocess.Popen(
        [*python, "program.py", method, etcd.endpoint, prefix],
        cwd=tmp_path,
        env={**os.environ, MARK: prefix},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout
        assert program.stdout.readline() == "[(0, 0), (1, 3)]\n"
        assert program.stdout.readline() == "waits\n"
        assert members(etcd, prefix)
        program.kill()
        until(lambda: not members(etcd, prefix) and not marked(prefix))
    finally:
        send(signal.SIGKILL, marked(prefix))
        program.communicate()


def members(etcd: EtcdServer, prefix: str) -> str:
    """The keys of the job's members."""
    return etcd.ctl("get", "--prefix", f"{prefix}/one/members/", "--keys-only").strip()


def test_p5_rdzv_conf_is_read_as_torch_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    def flags(**conf: str) -> list[str]:
        given = RendezvousParameters(NAME, "127.0.0.1:1", "job", 1, 2, timeout=900, **conf)
        return etcd_v3()(given)._flags  # type: ignore[no-any-return]

    assert "--settle=60" in flags(last_call_timeout="60")
    assert "--join-timeout=900" in flags()
    assert "--join-timeout=5" in flags(join_timeout="5")
    assert "--cacert=a" in flags(ca_cert="a", ssl_cert="b", ssl_cert_key="c")
    assert all("--rerun" in flags(rerun=yes) for yes in ("t", "Y", "1", "true"))
    assert "--rerun" not in flags(rerun="f")
    assert not caplog.messages
    for others in ("protocol", "etcd_prefix", "heartbeat_timeout"):
        flags(**{others: "5"})
        assert caplog.messages.pop() == f"--rdzv-conf {others} has no meaning for etcd-v3"
        caplog.clear()
    for key, wrong in (("rerun", "Ture"), ("join_timeout", "-1"), ("proof_of_death", "x")):
        with pytest.raises(ValueError, match=key):
            flags(**{key: wrong})


def test_what_cannot_work_is_told(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ETCDCTL_ENDPOINTS", raising=False)
    with pytest.raises(ValueError, match=r"--rdzv-conf setle: etcd-v3 has no such key.*settle"):
        nodes("n1", setle="1")
    with pytest.raises(ValueError, match=r"no job id: .*\n.*--rdzv-id"):
        nodes("n1", job="none")  # which is torch's own without --rdzv-id
    with pytest.raises(RendezvousError, match="no etcd: add --rdzv-endpoint"):
        nodes("n1", endpoint="").next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1\b"):
        nodes("n1", endpoint="127.0.0.1:1").next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match="1 node is ready; at least 2 must be"):
        nodes("n1", least=2, join_timeout="1").next_rendezvous()
