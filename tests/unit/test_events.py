"""`elastic-etcd events`: from a job's keys to torch's events."""

import asyncio
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace
from torch.distributed.elastic import events as torchs
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from elastic_etcd.cli.events import _Printer, event, news, past
from elastic_etcd.cli.query import while_read
from elastic_etcd.core.schema import Keys, Member, Phase, Requests, Scale, encode
from tests.support.etcd import EtcdServer
from tests.support.jobs import FAILURE, FINAL, FIRST, HOSTILE, KEYS, OUTCOME, OVER, RUNNING, view

DAY = "2026-11-21"
SETTLED = ["RENDEZVOUS", "STOPPED"]


def shorts(values: dict[str, str]) -> list[str]:
    return [e.name.rpartition(".")[2] for e in past("j", view(values))]


def test_what_a_job_went_through() -> None:
    assert shorts(RUNNING) == [
        "RENDEZVOUS",
        "FAILED",
        "STOPPED",
        "RENDEZVOUS",
        "hang",
        "straggler",
        "divergence",
        "drain",
    ]
    assert shorts(OVER) == [
        "RENDEZVOUS",
        "FAILED",
        "STOPPED",
        "RENDEZVOUS",
        "hang",
        "straggler",
        "divergence",
        "SUCCEEDED",
    ]
    alone = {KEYS.outcome: OVER[KEYS.outcome]}
    assert shorts(alone) == ["SUCCEEDED"]
    assert shorts({KEYS.history(7): "garbage"}) == ["malformed"]
    lines = [e.line() for e in past("j", view(RUNNING))]
    assert [tuple(re.split("  +", line)) for line in lines[:3]] == [
        (
            f"{DAY}T10:00:03.000Z",
            "RENDEZVOUS",
            "generation 1: the job begins; world of 2 on n1, n2",
        ),
        (
            f"{DAY}T10:01:05.500Z",
            "FAILED",
            f"generation 1: {FAILURE} after 61.5 s: RuntimeError: why",
        ),
        (f"{DAY}T10:01:05.510Z", "STOPPED", f"generation 1: {FAILURE} (trained 60.0 s, 600 steps)"),
    ]
    assert f"generation 2: {FAILURE}; 1.0 s later world of 2 on n1, " in lines[3]
    assert lines[4].startswith("-     ")  # nobody knows when


def test_o1_the_end_of_a_job_has_its_causes_last_words() -> None:
    failed = replace(OUTCOME, state="failed", reason="it is over", failure=FAILURE)
    *_, last = past("j", view({KEYS.outcome: encode(failed)}))
    assert last.text == "the job failed: it is over: RuntimeError: why"
    named = replace(failed, reason="3 failures were by RuntimeError: why")
    *_, last = past("j", view({KEYS.outcome: encode(named)}))
    assert last.text == "the job failed: 3 failures were by RuntimeError: why"


def test_the_job_is_scaled() -> None:
    wanted = Requests(scale=Scale(min_nodes=1, max_nodes=4, run="r", instead_of="1:2", by="ann"))
    *_, last = past("j", view(RUNNING | {KEYS.wanted: encode(wanted)}))
    assert (last.name, last.text) == ("elastic_etcd.scale", "the job is scaled to 1:4 nodes by ann")


@pytest.mark.parametrize(("as_json", "again"), [(False, ["STOPPED"]), (True, SETTLED)])
def test_what_becomes_known_later_is_told(
    capsys: pytest.CaptureFixture[str], *, as_json: bool, again: list[str]
) -> None:
    """A world's cause, and where its time went, are known when the next one begins."""
    early = replace(FIRST, ended="n2 is gone", spent=UNSET)
    told = _Printer(as_json=as_json)
    told.print(past("j", view(RUNNING | {KEYS.history(1): encode(early)})))
    capsys.readouterr()
    for _ in range(2):
        told.print(past("j", view(RUNNING)))
    printed = capsys.readouterr().out.splitlines()
    assert [name for line in printed for name in SETTLED if name in line] == again
    assert len(printed) == len(again)
    assert str(FAILURE) in printed[-1]


def test_they_are_torchs() -> None:
    """In its form, and with the metadata that its agent gives."""
    handler = SimpleNamespace(get_run_id=lambda: "j", get_backend=lambda: "etcd-v3")
    spec = SimpleNamespace(
        rdzv_handler=handler, role="r", max_restarts=3, get_entrypoint_name=lambda: "train.py"
    )
    group = SimpleNamespace(spec=spec, group_world_size=2, group_rank=0)
    agent: Any = SimpleNamespace(
        _worker_group=group, _total_execution_time=0, _remaining_restarts=2
    )
    worker: Any = SimpleNamespace(
        local_rank=0, role_rank=1, role_world_size=2, global_rank=1, id="4388"
    )
    known = SimpleElasticAgent._construct_event(
        agent, "FAILED", torchs.EventSource.WORKER, worker, exit_code=1, worker_pid=4388
    )
    ours = next(e for e in past("j", view(RUNNING)) if e.name.endswith("FAILED"))
    read = torchs.Event.deserialize(ours.json())
    assert (read.name, read.source) == (known.name, known.source)
    assert read.metadata.keys() == known.metadata.keys()
    for name in ("run_id", "global_rank", "worker_id", "state", "rdzv_backend"):
        assert read.metadata[name] == known.metadata[name]
    more, theirs = (json.loads(str(e.metadata["metadata"])) for e in (read, known))
    assert {n: more[n] for n in ("local_rank", "exit_code", "worker_pid")} == {
        n: theirs[n] for n in ("local_rank", "exit_code", "worker_pid")
    }
    assert read.metadata["raw_error"] == FAILURE.message
    assert read.timestamp == 1795255265500


@pytest.mark.parametrize("at", ["yesterday", "", "9999-12-31T23:59:59-23:59", "0001-01-01"])
def test_what_is_no_time_is_unknown(at: str) -> None:
    """Whoever may write keys writes them."""
    assert event("X", "it", job="j", at=at).line().partition(" ")[0] in (
        "-",
        "9999-12-31T23:59:59.000",
    )


def test_what_only_shows_as_it_happens() -> None:
    def told(before: dict[str, str], after: dict[str, str]) -> list[str]:
        return [e.text for e in news("j", view(before), view(after), 1)]

    more = {KEYS.member(0xC): encode(Member(0xC, "n3", 1, run="r"))}
    assert told(RUNNING, RUNNING) == []
    assert told(RUNNING, RUNNING | more) == ["n3 is there"]
    assert told(RUNNING | more, RUNNING) == ["n3 is gone"]
    leaves = {KEYS.member(0xC): encode(Member(0xC, "n3", 1, run="r", leaving=True))}
    assert told(RUNNING | more, RUNNING | leaves) == ["n3 is leaving"]
    assert told(RUNNING, RUNNING | leaves) == ["n3 is there", "n3 is leaving"]
    over = {KEYS.round: encode(replace(FINAL, coordinator=0xB, node="n2"))}
    assert told(RUNNING, RUNNING | over) == ["generation 2: n2 coordinates from here on"]
    claimed = {KEYS.round: encode(replace(FINAL, generation=3, phase=Phase.SETUP, reason="why"))}
    assert told(RUNNING, RUNNING | claimed) == ["generation 3 is setup: why"]


@pytest.mark.timeout(120)
def test_followed_to_the_end(etcd: EtcdServer, prefix: str) -> None:
    keys = Keys(f"{prefix}/j")
    for key, value in RUNNING.items():
        etcd.ctl("put", key.replace(KEYS.root, keys.root), value)
    command = [sys.executable, "-m", "elastic_etcd", "events", "j", "--follow"]
    command += ["--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout
        before = [next(shown.stdout) for _ in range(8)]
        assert HOSTILE not in "".join(before)
        assert "<script>\\x1b[2J&" in before[3]
        etcd.ctl("put", keys.member(0xC), encode(Member(0xC, "n3", 1, run="r")))
        assert next(shown.stdout).endswith("node.joined     n3 is there\n")
        for lease in (0xA, 0xB, 0xC):
            etcd.ctl("del", keys.member(lease))
        etcd.ctl("put", keys.outcome, encode(OUTCOME))
        after = shown.stdout.read().splitlines()
        assert [line.split()[1] for line in after] == ["node.gone"] * 3 + ["SUCCEEDED"]
    assert shown.returncode == 0


def test_what_prints_into_a_string_is_read_for_ever() -> None:
    """As in a notebook: there is no descriptor whose reader could go."""

    async def doing() -> None:
        print("done")

    with redirect_stdout(StringIO()) as out:
        asyncio.run(while_read(doing()))
    assert out.getvalue() == "done\n"


@pytest.mark.parametrize("which", ["j", "--all"])
def test_it_ends_when_nobody_reads_it_any_more(etcd: EtcdServer, prefix: str, which: str) -> None:
    """As after `| head`, though nothing happens."""
    for key, value in RUNNING.items():
        etcd.ctl("put", key.replace(KEYS.root, f"{prefix}/j"), value)
    command = [sys.executable, "-m", "elastic_etcd", "events", which, "--follow"]
    command += ["--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        assert shown.stdout
        assert shown.stderr
        try:
            for _ in range(7):
                next(shown.stdout)
            shown.stdout.close()
            assert shown.wait(60) == 0
            assert shown.stderr.read() == b""
        finally:
            shown.kill()
