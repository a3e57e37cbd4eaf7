"""What an agent's metrics say of its state, and how they are served."""

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.error import URLError

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.loop_watchdog import Watchdog
from elastic_etcd.agent.followers.metrics import Metrics, nodes, serving, unready
from elastic_etcd.agent.followers.recovery import Recovery
from elastic_etcd.core.lifecycle import Finished, Life, State, Tick, WorkersDiverged
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    Cause,
    Hang,
    Limits,
    Master,
    Member,
    Outcome,
    Page,
    Participant,
    Phase,
    Round,
)
from elastic_etcd.core.view import Everything, Narrow, View
from elastic_etcd.protocol.messages import UNCOUNTED
from elastic_etcd.system import sockets
from tests.support.aio import elapse
from tests.support.prometheus import get, values

DEADLINE = 60.0
CONFIG = AgentConfig(
    None, "j", ("train",), "n1", 1, Limits(1, 2), lease_ttl=1, metrics_addr=("127.0.0.1", 0)
)
OWN, OTHER, THIRD = 0xA, 0xB, 0xC
FINAL = Round(3, Phase.FINAL, OTHER, "the job begins", "r", "n2", 1, 1, Master("n2", 80))


def state(now: Round | None, world: tuple[int, ...] = (), **own: int | bool) -> State:
    """An agent's, for which these leases make the world."""
    parts = tuple(Participant(lease, "n", 1, n, n) for n, lease in enumerate(world))
    view = View(9, Narrow(), round=now, page=Page(3, parts))
    return State(Local("r", OWN, **own), 1, Life.MEMBER, view=view)  # type: ignore[arg-type]


SPARE = state(FINAL, (OTHER,), acked=3)
IN_WORLD = state(FINAL, (OWN,), running=3, ran=3)


@pytest.mark.parametrize(
    ("seen", "why_not"),
    [
        (State(Local(""), 1), "joining"),
        (state(None), "no round"),
        (state(replace(FINAL, phase=Phase.FROZEN), acked=3), "generation 3: frozen"),
        (state(FINAL, (OWN,), acked=3), "not in generation 3"),
        (IN_WORLD, ""),
        (state(FINAL, (OWN,), running=3, ran=3, stopping=True), "generation 3: final"),
        (state(FINAL, (OWN,), ran=3), "not in generation 3"),
        (replace(state(FINAL, (OWN,), ran=3), result=Finished()), ""),
        (SPARE, ""),
        (state(FINAL, (OTHER,), acked=2), "not in generation 3"),
        (replace(state(FINAL, (OTHER,), acked=3), life=Life.LOST), "lost"),
        (state(FINAL, (OWN,), running=3, leaving=True), "leaving"),
    ],
)
def test_ready_is_who_is_in_a_world_or_a_spare(seen: State, why_not: str) -> None:
    assert unready(seen) == why_not


def test_only_the_coordinator_tells_more_than_who_trains() -> None:
    assert IN_WORLD.view
    assert nodes(IN_WORLD.view) == {"training": 1}
    members = (Member(OWN, "n1", 1), Member(OTHER, "n2", 1), Member(THIRD, "n3", 1, leaving=True))
    world = (Participant(OWN, "n1", 1, 0, 0),)
    view = replace(IN_WORLD.view, coverage=Everything(), members=members, world=world)
    assert nodes(view) == {"training": 1, "spare": 1, "waiting": 0, "leaving": 1}
    forming = replace(view, round=replace(FINAL, phase=Phase.JOINABLE))
    assert nodes(forming) == {"training": 0, "spare": 0, "waiting": 2, "leaving": 1}


def test_what_is_lost_by_a_change_of_world() -> None:
    recovery = Recovery()
    recovery.begin_world(Cause.JOIN, 0.0)  # the first one
    recovery.train(5.0)
    assert not any(recovery.restarts.values())
    recovery.end_world(10.0, idle=1.0)
    recovery.pass_phase("stop", 12.0)
    recovery.begin_world(Cause.FAILURE, 15.0)
    recovery.pass_phase("start", 19.0)
    recovery.train(24.0)
    took = [recovery.phases[name].sum for name in recovery.phases]
    assert took == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert recovery.lost["failure"] == sum(took)
    recovery.end_world(30.0, idle=0.0)
    recovery.pass_phase("stop", 31.0)
    recovery.forget()  # a spare, for long
    recovery.begin_world(Cause.LOST, 1000.0)
    assert recovery.lost["lost"] == 0.0


def test_two_worlds_that_end_before_their_first_step_are_lost_by_each_cause() -> None:
    recovery = Recovery()
    recovery.end_world(10.0, idle=0.0)
    recovery.begin_world(Cause.FAILURE, 11.0)
    recovery.pass_phase("start", 13.0)
    recovery.end_world(14.0, idle=0.0)
    recovery.begin_world(Cause.LEAVE, 15.0)
    recovery.train(16.0)
    assert (recovery.lost["failure"], recovery.lost["leave"]) == (3.0, 2.0)


async def test_probes_are_answered_while_the_loop_stands() -> None:
    def stands_until_it_is_seen(address: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while get(address, "/healthz")[0] != 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert get(address, "/metrics")[0] == 200

    with serving(CONFIG) as metrics:
        address = metrics.address
        async with Watchdog(CONFIG.lease_ttl) as watchdog:
            metrics.watch(watchdog)
            stands_until_it_is_seen(address)
            async with asyncio.timeout(DEADLINE):
                while (await asyncio.to_thread(get, address, "/healthz"))[0] != 200:
                    await elapse(0.05)
        metrics.see(SPARE, Tick(), SPARE)
        assert get(address, "/readyz") == (200, "ok\n")
        assert values(address)["elastic_etcd_generation"] == 3
        assert get(address, "/other")[0] == 404
    with pytest.raises(URLError, match="refused"):
        get(address, "/healthz")


def test_whoever_says_nothing_keeps_nobody_else_out() -> None:
    with serving(CONFIG) as metrics:
        host, _, port = metrics.address.rpartition(":")
        silent = [socket.create_connection((host, int(port)), timeout=DEADLINE) for _ in range(9)]
        assert get(metrics.address, "/healthz")[0] == 200
        for each in silent:
            each.close()


def connected(stack: ExitStack, address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE))


def test_o9_slow_requests_take_no_probe_s_place() -> None:
    """More of them than there are places, each of which says a little now and then."""
    with serving(CONFIG) as metrics, ExitStack() as stack:
        slow = [connected(stack, metrics.address) for _ in range(300)]
        for _ in range(3):
            for each in slow:
                with suppress(OSError):  # it has lost its place
                    each.sendall(b"GET /healthz HTTP/1.1\r\nX")
            assert get(metrics.address, "/healthz") == (200, "ok\n")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_are_those_of_both_families(host: str) -> None:
    """The probes of a cluster come from an address of its family: of IPv6 none was answered."""
    with serving(dataclasses.replace(CONFIG, metrics_addr=(host, 0))) as metrics:
        at, _, port = metrics.address.rpartition(":")
        assert at == ("[::]" if host == "::" else host)
        for near in ("127.0.0.1", "::1"):
            with socket.create_connection((near, int(port)), timeout=DEADLINE) as probe:
                probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert probe.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_machine_without_ipv6_has_the_other_one(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python says of a kernel that was booted with ipv6.disable=1."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with sockets.listen(host, 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_o9_a_request_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_etcd.agent.followers.metrics._DEADLINE", 0.5)
    with serving(CONFIG) as metrics, ExitStack() as stack:
        slow = connected(stack, metrics.address)
        slow.settimeout(0.05)
        deadline = time.monotonic() + DEADLINE
        while True:
            assert time.monotonic() < deadline
            try:
                slow.sendall(b"x")
                if not slow.recv(1):
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break


def test_o9_a_request_of_more_than_8_kib_is_not_read() -> None:
    with serving(CONFIG) as metrics, ExitStack() as stack:
        long = connected(stack, metrics.address)
        long.sendall(b"GET /metrics HTTP/1.1\r\nX: " + bytes(20_000))
        with suppress(ConnectionResetError):
            assert long.recv(1) == b""


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"HEAD /healthz?x=1 HTTP/1.0", b"200 OK", b""),
        (b"GET /healthz?x=1 HTTP/1.0", b"200 OK", b"ok\n"),
        (b"GET /other HTTP/1.1", b"404 Not Found", b"/metrics, /healthz, /readyz\n"),
        (b"POST /metrics HTTP/1.1", b"400 Bad Request", b"only GET and HEAD\n"),
        (b"\xff", b"400 Bad Request", b"only GET and HEAD\n"),
    ],
)
def test_what_is_answered(request_line: bytes, status: bytes, body: bytes) -> None:
    with serving(CONFIG) as metrics, ExitStack() as stack:
        sock = connected(stack, metrics.address)
        sock.sendall(request_line + b"\r\n\r\n")
        answer = sock.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert answer.partition(b"\r\n\r\n")[2] == body


def launch(tmp_path: Path, *flags: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text("print('trained')")
    code = f"import sys; {before}; from elastic_etcd.launch import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *flags, "--start-method=exec", str(script)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=50
    )


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launch(tmp_path, "--metrics-addr", str(port))
    assert done.returncode == 2
    said = (
        f"]: error: --metrics-addr 127.0.0.1:{port}: Address already in use.\n    Give each agent"
    )
    assert said in done.stderr


def test_a_library_that_is_missing_is_told_before_anything_starts(tmp_path: Path) -> None:
    done = launch(tmp_path, "--metrics-addr=0", before="sys.modules['prometheus_client'] = None")
    assert done.returncode == 2
    assert "]: error: --metrics-addr: No module named 'prometheus_client" in done.stderr
    assert "elastic_etcd[metrics]" in done.stderr


def test_many_metrics_and_few_labels() -> None:
    metrics = Metrics(CONFIG)
    metrics.requests.observe(0.004)
    lines = [line for line in metrics.text().decode().splitlines() if line[0] != "#"]
    assert all('training_job="j"' in line and 'node="n1"' in line for line in lines)
    assert (
        'elastic_etcd_etcd_request_seconds_bucket{le="0.005",node="n1",training_job="j"} 1.0'
        in lines
    )
    assert len(lines) < 150


def test_t6_workers_that_differ_are_counted_where_they_are() -> None:
    metrics = Metrics(CONFIG)
    for named in (True, False, True):
        metrics.see(SPARE, WorkersDiverged(3, 0, "replicas differ", named, alone=False), SPARE)
    line = 'elastic_etcd_divergences_total{node="n1",training_job="j"} 2.0'
    assert line in metrics.text().decode().splitlines()


def told(seen: State) -> dict[str, float]:
    metrics = Metrics(CONFIG)
    metrics.see(seen, Tick(), seen)
    lines = (line.rpartition(" ") for line in metrics.text().decode().splitlines())
    return {name: float(value) for name, _, value in lines if name.startswith("elastic_etcd_")}


def test_o3_how_many_failures_are_left_and_how_it_ended() -> None:
    """No `job`, which is Prometheus' own label: all jobs would be one."""
    of, view = 'node="n1",training_job="j"', IN_WORLD.view
    assert view
    now = replace(FINAL, restarts=2)
    left = f"elastic_etcd_restart_budget_left{{{of}}}"
    limits = {most: Limits(1, 2, max_restarts=most) for most in (0, 3, UNCOUNTED)}
    seen = {
        most: told(replace(IN_WORLD, view=replace(view, round=now), limits=limits[most]))
        for most in limits
    }
    assert [seen[most].get(left) for most in limits] == [None, 1.0, None]
    assert not any(name.startswith(("elastic_etcd_job{", 'job="')) for name in seen[3])
    outcome = Outcome("failed", "why", "r", 3, 3, at="2026-11-21T10:00:00+00:00")
    ended = told(replace(IN_WORLD, view=replace(view, outcome=outcome)))
    assert (
        ended['elastic_etcd_outcome_timestamp_seconds{node="n1",state="failed",training_job="j"}']
        == 1795255200
    )
    assert told(replace(IN_WORLD, view=replace(view, outcome=replace(outcome, at="soon"))))


def test_o3_a_hang_counts_once() -> None:
    metrics = Metrics(CONFIG)
    assert IN_WORLD.view
    asked = Hang(3, 1, 60.0)
    for hang in (
        None,
        asked,
        replace(asked, alarm=True),
        replace(asked, alarm=True),
        asked,
        replace(asked, number=2, alarm=True),
    ):
        seen = replace(IN_WORLD, view=replace(IN_WORLD.view, hang=hang))
        metrics.see(seen, Tick(), seen)
    assert 'elastic_etcd_hangs_total{node="n1",training_job="j"} 2.0' in metrics.text().decode()
    assert 'elastic_etcd_hanging{node="n1",training_job="j"} 1.0' in metrics.text().decode()
    over = replace(asked, number=3, line="all ranks go on")
    seen = replace(IN_WORLD, view=replace(IN_WORLD.view, hang=over))
    metrics.see(seen, Tick(), seen)
    assert 'elastic_etcd_hanging{node="n1",training_job="j"} 0.0' in metrics.text().decode()
