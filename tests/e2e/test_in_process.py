"""Workers that recover in process: which of them live on, and that no sample is lost for it."""

import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from .harness import Agent, Job
from .invariants import Event
from .processes import send

TRAINER = str(Path(__file__).with_name("elastic_trainer.py"))

pytestmark = pytest.mark.timeout(120)


def start(job: Job, node: str, *arguments: str, **flags: Any) -> Agent:
    return job.start(node, script=(TRAINER, "--dir", str(job.directory), *arguments), **flags)


def samples(job: Job) -> dict[int, list[dict[str, Any]]]:
    """What each step has trained on in the end: a step that was rolled back is void."""
    lines = [
        json.loads(line)
        for path in job.directory.glob("*.samples")
        for line in path.read_text().splitlines()
    ]
    last: dict[int, int] = defaultdict(int)
    for line in lines:
        last[line["step"]] = max(last[line["step"]], line["generation"])
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["generation"] == last[line["step"]]:
            steps[line["step"]].append(line)
    return steps


def each_sample_once(job: Job, length: int = 240) -> None:
    """In every epoch but the last, which may have been stopped in the middle."""
    used: dict[int, list[int]] = defaultdict(list)
    for lines in samples(job).values():
        for line in lines:
            used[line["epoch"]] += line["indices"]
    assert used
    for epoch, indices in used.items():
        assert len(set(indices)) == len(indices), f"epoch {epoch} repeats samples"
        if epoch != max(used):
            assert sorted(indices) == list(range(length)), f"epoch {epoch} lacks samples"


def begun(job: Job, generation: int) -> dict[str, Event]:
    """The workers of a generation, by node."""
    return {e.node: e for e in job.events("start") if e.generation == generation}


def test_a_killed_worker_leaves_its_peer_s_process_alive(job: Job) -> None:
    n1, n2 = start(job, "n1"), start(job, "n2")
    g = job.trains(2)
    before = begun(job, g)
    send(signal.SIGKILL, [before["n2"].pid])
    g = job.trains(2, after=g)
    after = begun(job, g)
    assert after["n1"].pid == before["n1"].pid, "the survivor was started anew"
    assert after["n2"].pid != before["n2"].pid
    job.finish(n1, n2)
    each_sample_once(job)


def test_a_frozen_peer_is_left_behind(job: Job) -> None:
    """It keeps its connections open and says nothing: gloo would wait for half an hour."""
    n1, n2 = start(job, "n1"), start(job, "n2")
    g = job.trains(2)
    survivor = begun(job, g)["n1"].pid
    n2.freeze()
    g = job.trains(1, after=g)
    assert begun(job, g)["n1"].pid == survivor
    n2.thaw()
    g = job.trains(2, after=g)
    assert begun(job, g)["n1"].pid == survivor, "it stopped for a planned change, and went on"
    job.finish(n1, n2)
    each_sample_once(job)


def test_a_node_joins_and_leaves_and_no_step_is_lost(job: Job) -> None:
    n1 = start(job, "n1", "--loaders", "2", settle=0)
    g = job.trains(1)
    first = begun(job, g)["n1"].pid
    n2 = start(job, "n2", "--loaders", "2")
    g = job.trains(2, after=g)
    assert begun(job, g)["n1"].pid == first
    n2.terminate()
    job.exits(n2, 0)
    g = job.trains(1, after=g)
    assert begun(job, g)["n1"].pid == first
    job.finish(n1)
    each_sample_once(job)
    steps = [e.step for e in job.events("step") if e.node == "n1"]
    assert steps == list(range(1, len(steps) + 1)), "a step was trained twice"


def test_the_first_node_leaves(job: Job) -> None:
    """It has rank 0, and hosts the store that the others agree through where to stop."""
    nodes = [start(job, name, nnodes="1:3") for name in ("n1", "n2", "n3")]
    g = job.trains(3)
    first = next(node for node in nodes if begun(job, g)[node.node].rank == 0)
    others = [node for node in nodes if node is not first]
    first.terminate()
    job.exits(first, 0)
    before, g = begun(job, g), job.trains(2, after=g)
    assert all(begun(job, g)[n.node].pid == before[n.node].pid for n in others)
    job.finish(*others)
    each_sample_once(job)
    for node in others:
        steps = [e.step for e in job.events("step") if e.node == node.node]
        assert steps == list(range(1, len(steps) + 1)), "a step was trained twice"


def test_a_mistake_of_the_user_s_is_the_cause(job: Job) -> None:
    fault = ("--fault", "raise", "--at", "5", "--on", "1")
    n1, n2 = (start(job, name, *fault, max_restarts=0) for name in ("n1", "n2"))
    job.exits(n1, 1)
    job.exits(n2, 1)
    for node in (n1, n2):
        last = node.output[node.output.rindex("elastic_etcd[") :]
        assert "ValueError: a mistake of the user's" in last, last
    assert "lost its peers" not in n1.output + n2.output


def test_a_worker_that_is_stuck_is_killed_and_started_anew(job: Job) -> None:
    fault = ("--fault", "stuck", "--at", "5", "--on", "1")
    nodes = {name: start(job, name, *fault, nnodes="1:3") for name in ("n1", "n2", "n3")}
    stuck = job.wait("it is stuck", lambda: job.events("stuck"))[0]
    before = begun(job, g := stuck.generation)
    killed, survivor = (e for e in before.values() if e.pid != stuck.pid)
    send(signal.SIGKILL, [killed.pid])
    g = job.trains(3, after=g)
    after = begun(job, g)
    assert after[survivor.node].pid == survivor.pid
    assert after[stuck.node].pid != stuck.pid
    assert not Path(f"/proc/{stuck.pid}").exists()
    job.finish(*nodes.values())
    each_sample_once(job)


@pytest.mark.parametrize("arguments", [("--outside",), ("--loaders", "2")])
def test_all_workers_of_a_node_at_once(job: Job, arguments: tuple[str, ...]) -> None:
    n1, n2 = (start(job, name, *arguments, nproc=2) for name in ("n1", "n2"))
    g = job.trains(4)
    workers = [e for e in job.events("start") if e.generation == g]
    send(signal.SIGKILL, [e.pid for e in workers if e.node == "n1"])
    g = job.trains(4, after=g)
    again = {e.pid for e in job.events("start") if e.generation == g}
    assert {e.pid for e in workers if e.node == "n2"} < again
    job.finish(n1, n2)
    each_sample_once(job)
