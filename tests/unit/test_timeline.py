"""`elastic-etcd timeline`: what each node did, as a trace."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.cli.timeline import of_history, trace
from elastic_etcd.core.schema import Keys
from tests.support.etcd import EtcdServer
from tests.support.jobs import FIRST, HOSTILE, KEYS, OVER, RUNNING, SECOND, view

BEGAN = datetime.fromisoformat(str(FIRST.began_at)).timestamp()
SECOND_BEGAN = datetime.fromisoformat(str(SECOND.began_at)).timestamp()
FIRST_WORLD = [
    ("waiting", -3.0, 0.0),
    ("starting", 0.0, 2.0),
    ("training", 2.0, 61.1),
    ("trained again", 61.1, 62.0),
    ("waiting", 62.0, 62.25),
    ("stopping", 62.25, 63.0),
]


Events = list[tuple[str, dict[str, Any]]]


def since_it_began(microseconds: int) -> float:
    return round(microseconds / 1e6 - BEGAN, 3)


def done(events: Events, node: str) -> list[tuple[str, float, float]]:
    """What a node did, and when, since the first world began."""
    own = [e for whose, e in events if whose == node and e["ph"] == "X"]
    return [(e["name"], since_it_began(e["ts"]), since_it_began(e["ts"] + e["dur"])) for e in own]


def test_of_what_etcd_holds() -> None:
    spans = list(of_history(view(RUNNING), SECOND_BEGAN + 10))
    assert done(spans, "n2") == FIRST_WORLD
    assert done(spans, "n1") == [*FIRST_WORLD, ("training", 63.5, 73.5)]
    assert done(spans, HOSTILE) == [("training", 63.5, 73.5)]
    saved = [(node, since_it_began(e["ts"])) for node, e in spans if e["name"] == "saved"]
    assert saved == [("n1", 61.1), ("n2", 61.1)]
    over = done(list(of_history(view(OVER), 0.0)), "n1")
    assert over[-2:] == [("starting", 63.5, 64.25), ("training", 64.25, 183.25)]


def test_the_trace_has_a_process_for_each_node() -> None:
    events = json.loads(trace(list(of_history(view(RUNNING), SECOND_BEGAN + 10))))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == sorted(["n1", "n2", HOSTILE])
    assert [e["ph"] for e in events].count("X") == 14
    assert [e["ph"] for e in events].count("i") == 2
    first = next(e for e in events if e["name"] == "starting")
    assert (first["ts"], first["dur"]) == (round(BEGAN * 1e6), 2_000_000)


@pytest.fixture
def call(etcd: EtcdServer, prefix: str) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    keys = Keys(f"{prefix}/j")
    for key, value in OVER.items():
        etcd.ctl("put", key.replace(KEYS.root, keys.root), value)

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "elastic_etcd", "timeline", "j", *more]
        where = ("--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60")
        return subprocess.run([*command, *where], capture_output=True, text=True, check=False)

    return run


def test_from_a_real_etcd(
    call: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    traced = tmp_path / "j.json"
    printed = call("--out", str(traced))
    assert (printed.returncode, printed.stdout) == (0, f"{traced}: 3 nodes\n")
    events = json.loads(traced.read_text())["traceEvents"]
    (n2,) = [e["pid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "n2"]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == n2]
    assert [e["name"] for e in spans] == [doing for doing, _, _ in FIRST_WORLD]
    refused = call("--out", str(tmp_path / "nowhere" / "j.json"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "No such file or directory" in refused.stderr
