"""`elastic-etcd report`: a run's goodput, from its history."""

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.agent.goodput import at_end, of_run
from elastic_etcd.cli.report import describe
from elastic_etcd.core.schema import Hang, History, Keys, Spent, decode, encode
from elastic_etcd.core.words import fields
from elastic_etcd.errors import ElasticEtcdError
from tests.support.etcd import EtcdServer
from tests.support.jobs import FIRST, KEYS, OVER, RUNNING, SECOND, SPENT, view

BEGAN = datetime.fromisoformat(str(SECOND.began_at)).timestamp()
LAST = decode(History, OVER[KEYS.history(2)])
LEFT = {key: value for key, value in RUNNING.items() if not key.startswith(KEYS.members)}
HUNG = Hang(
    2,
    2,
    10.0,
    line="rank 1 ...",
    alarm=True,
    at=datetime.fromtimestamp(BEGAN + 30, UTC).isoformat(),
)
TOLD = [
    *("job j", "state succeeded", "run r", "generation 2"),
    *("goodput 0.9575", "seconds 186.0", "trained 178.1"),
    "lost (detect 0.25, stop 0.75, rendezvous 3.25, start 2.0, first_step 0.75, again 0.9)",
    *("worlds 2", "restarts 1", "pause 2.0", "steps 1800", "commits 180"),
]


@pytest.mark.parametrize(
    ("keys", "now", "expected"),
    [
        (OVER, 0, {"state": "succeeded", "going_on": 0.0, "planned": 0, "trained": 178.1}),
        (RUNNING, 100, {"state": "training", "going_on": 100.0, "worlds": 2, "trained": 159.1}),
        (RUNNING, -5, {"going_on": 0.0}),  # this machine's clock is late
        (LEFT, 100, {"going_on": 0.0}),
        # A hang that lasts is not trained.
        (RUNNING, 100, {"hangs": 0.0, "seconds": 166.0}),
        (
            RUNNING | {KEYS.hang: encode(HUNG)},
            100,
            {"going_on": 20.0, "hangs": 80.0, "trained": 79.1, "seconds": 166.0},
        ),
        # Only the newest run counts, and garbage does not.
        (
            {
                KEYS.history(1): encode(replace(FIRST, run="older")),
                KEYS.history(2): OVER[KEYS.history(1)],
                KEYS.history(3): "garbage",
            },
            0,
            {"run": "r", "worlds": 1},
        ),
    ],
)
def test_the_newest_run_of_a_job(
    keys: dict[str, str], now: float, expected: dict[str, object]
) -> None:
    found = describe("j", view(keys), BEGAN + now)
    assert {name: found[name] for name in expected} == expected
    assert sum(found["lost"].values()) + found["trained"] == pytest.approx(found["seconds"])


def test_a_job_that_had_no_world() -> None:
    with pytest.raises(ElasticEtcdError, match="job j has had no world yet"):
        describe("j", view({}), 0.0)


def test_text_and_json_have_the_same_names() -> None:
    found = describe("j", view(OVER), 0.0)
    assert list(fields(found)) == TOLD
    assert {line.split()[0] for line in TOLD} <= found.keys()


@pytest.mark.parametrize(
    ("entry", "goodput", "more"),
    [
        (History(1), None, {"seconds": 0.0}),
        (replace(FIRST, spent=Spent(unknown=40.0, rendezvous=2.0)), None, {"unknown": 40.0}),
        (replace(SECOND, spent=replace(SPENT, unknown=40.0)), 0.8955, {"seconds": 132.0}),  # N5
        (replace(FIRST, spent=replace(SPENT, commits=0, again=0.0)), 0.9091, {"commits": 0}),
        (
            replace(SECOND, spent=Spent(worlds=3, planned=1), spent_before=UNSET),
            None,
            {"restarts": 2, "planned": 1, "pause": 0.0},
        ),
    ],
)
def test_what_nobody_knows_is_no_part_of_goodput(
    entry: History, goodput: float | None, more: dict[str, float]
) -> None:
    found = of_run(entry)
    assert (found["goodput"], {name: found[name] for name in more}) == (goodput, more)
    assert f"goodput {goodput or 'unknown'}" in list(fields(found))


def test_only_who_had_rank_0_in_the_last_world_says_it() -> None:
    assert list(at_end(LAST)) == [", ".join(fields(of_run(LAST)))]
    assert list(at_end(FIRST)) == []
    assert list(at_end(replace(FIRST, outcome=LAST.outcome, spent=Spent(stop=0.7)))) == []


def test_from_a_real_etcd(etcd: EtcdServer, prefix: str) -> None:
    keys = Keys(f"{prefix}/j")
    for key, value in OVER.items():
        etcd.ctl("put", key.replace(KEYS.root, keys.root), value)

    def call(job: str, *more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "elastic_etcd", "report", job, *more]
        where = ("--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60")
        return subprocess.run([*command, *where], capture_output=True, text=True, check=False)

    told = {"version": 1, **describe("j", view(OVER), 0.0)}
    assert json.loads(call("j", "--json").stdout) == told
    assert call("j").stdout.splitlines() == ["job j", *(f"  {line}" for line in TOLD[1:])]
    nobody = call("k")
    assert nobody.returncode == 1
    assert nobody.stderr.startswith(f"error: {etcd.endpoint} has no job at {prefix}/k; ")
