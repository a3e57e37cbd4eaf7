"""`elastic-etcd report`: a run's goodput, from its history."""

import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.agent.goodput import at_end, lines, of_run
from elastic_etcd.cli.report import describe
from elastic_etcd.core.schema import Hang, History, Keys, Spent, decode, encode
from elastic_etcd.errors import ElasticEtcdError
from tests.support.etcd import EtcdServer
from tests.support.jobs import FIRST, KEYS, OVER, RUNNING, SECOND, SPENT, view

LOST = (
    *("lost: detect 0.2 s", "stop 0.8 s", "rendezvous 3.2 s"),
    *("start 2.0 s", "first step 0.8 s", "trained again 0.9 s"),
)
BEGAN = datetime.fromisoformat(str(SECOND.began_at)).timestamp()


def test_a_run_that_is_over() -> None:
    found = describe("j", view(OVER), 0.0)
    assert (found["state"], found["worlds"], found["restarts"], found["planned"]) == (
        *("succeeded", 2, 1),
        0,
    )
    assert found["seconds"] == 186.0
    assert found["trained"] == 60.0 - 0.9 + 119.0
    assert found["goodput"] == round(178.1 / 186, 4)
    assert found["lost"] == {
        "detect": 0.25,
        "hang": 0.0,
        "stop": 0.75,
        "rendezvous": 3.25,
        "start": 2.0,
        "first_step": 0.75,
        "again": 0.9,
    }
    assert sum(found["lost"].values()) + found["trained"] == pytest.approx(found["seconds"])
    assert (found["pause"], found["steps"], found["going_on"]) == (2.0, 1800, 0.0)
    assert [w["generation"] for w in found["by_world"]] == [1, 2]
    assert list(lines(found)) == [
        "goodput 95.8 %: trained for 178.1 of 186.0 s",
        ", ".join(LOST),
        "1 change of the world; longest pause 2.0 s",
    ]


def test_a_pause_that_nobody_knows_is_not_said_to_be_none() -> None:
    """Of scripts whose steps are not seen."""
    unseen = replace(SECOND, spent=Spent(unknown=40.0, rendezvous=2.0))
    assert list(lines(of_run(unseen)))[-1] == "1 change of the world"


def test_only_who_had_rank_0_in_the_last_world_says_it() -> None:
    last = decode(History, OVER[KEYS.history(2)])
    assert list(at_end(last)) == list(lines(of_run(last)))
    assert list(at_end(FIRST)) == []
    assert list(at_end(replace(FIRST, outcome=last.outcome, spent=Spent(stop=0.7)))) == []


def test_a_run_that_goes_on() -> None:
    found = describe("j", view(RUNNING), BEGAN + 100)
    assert (found["state"], found["going_on"], found["worlds"]) == ("training", 100.0, 2)
    assert found["trained"] == 60.0 - 0.9 + 100.0
    early = describe("j", view(RUNNING), BEGAN - 5)  # this machine's clock is late
    assert early["going_on"] == 0.0
    left = {key: value for key, value in RUNNING.items() if not key.startswith(KEYS.members)}
    assert describe("j", view(left), BEGAN + 100)["going_on"] == 0.0


def test_a_hang_that_lasts_is_not_trained() -> None:
    at = datetime.fromtimestamp(BEGAN + 30, UTC).isoformat()
    hang = Hang(2, 2, 10.0, line="rank 1 ...", alarm=True, at=at)
    found = describe("j", view(RUNNING | {KEYS.hang: encode(hang)}), BEGAN + 100)
    assert (found["going_on"], found["hangs"], found["lost"]["hang"]) == (20.0, 80.0, 80.0)
    assert found["trained"] == 60.0 - 0.9 + 20.0
    before = describe("j", view(RUNNING), BEGAN + 100)
    assert (before["seconds"], before["hangs"]) == (found["seconds"], 0.0)


def test_what_nobody_knows_is_said() -> None:
    unknown = replace(FIRST, spent=Spent(unknown=40.0, rendezvous=2.0))
    text = "\n".join(lines(of_run(unknown)))
    assert text.startswith("goodput is not known: no steps were seen\n")
    assert "not known: 40.0 s, of worlds whose steps nobody saw" in text
    some = replace(SECOND, spent=replace(SPENT, unknown=40.0))  # N5
    share = "goodput 89.5 % of what is known: trained for 118.2 of 132.0 s"
    assert next(lines(of_run(some))) == share
    plain = replace(FIRST, spent=replace(SPENT, commits=0, again=0.0))
    assert "what was trained again is not known" in "\n".join(lines(of_run(plain)))
    assert next(lines(of_run(History(1)))) == "goodput is not known: no steps were seen"
    for planned, told in ((0, ""), (1, ", 1 of them planned"), (2, ", planned")):
        changed = replace(SECOND, spent=Spent(worlds=3, planned=planned), spent_before=UNSET)
        assert list(lines(of_run(changed)))[-1] == f"2 changes of the world{told}"


def test_only_the_newest_run_counts_and_garbage_does_not() -> None:
    older = encode(replace(FIRST, generation=1, run="older"))
    again = {KEYS.history(1): older, KEYS.history(2): OVER[KEYS.history(1)]}
    found = describe("j", view(again | {KEYS.history(3): "garbage"}), 0.0)
    assert (found["run"], found["worlds"], len(found["by_world"])) == ("r", 1, 1)
    with pytest.raises(ElasticEtcdError, match="job j has had no world yet"):
        describe("j", view({}), 0.0)


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
    assert call("j").stdout.startswith("job j: succeeded, run r\n  goodput 95.8 %: trained")
    nobody = call("k")
    assert nobody.returncode == 1
    assert nobody.stderr.startswith(f"error: {etcd.endpoint} has no job at {prefix}/k; ")
