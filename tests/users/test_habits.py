"""Scripts as people write them: after each fault their curves are those of an undisturbed run.

To the last bit. Each training of habits.py meets every fault; they share a job for each.
"""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job import Agent, Job
from tests.users.habits import HABITS, SHARDED, STEPS

pytestmark = [pytest.mark.timeout(1800), pytest.mark.nightly(part="users")]

SCRIPT = str(Path(__file__).with_name("habits.py"))
PATIENCE = 600
AGAIN = 6  # steps at most that one failure costs: the longest time between two commits

CALM = 500  # steps of each training in which nothing is to be said; as many more by hand
RIGHT = ("nanogpt", "gan", "unfreeze", "swa", "lora", "muon", "detr", "yolo", "reinforce", "warmup")

Curve = dict[tuple[str, int], list[str]]  # of each step of a training, all losses that it had


def curve(job: Job, size: int = 2) -> Curve:
    found: Curve = {}
    for name, step, loss, world in lines(job):
        assert world == str(size)
        found.setdefault((name, int(step)), []).append(loss)
    return found


def lines(job: Job) -> list[list[str]]:
    """Of the curve. No alarm was raised: the replicas were compared at each commit."""
    assert not [agent.node for agent in job.agents if "replicas differ" in agent.output]
    return [line.split(",") for line in (job.directory / "curve.csv").read_text().splitlines()]


def start(
    job: Job,
    fault: str,
    nproc: int = 1,
    *,
    nnodes: str = "",
    names: tuple[str, ...] = (),
    directory: Path | str = "",
    batch: int = 4,
) -> Agent:
    return job.start(
        f"n{len(job.agents) + 1}",
        nnodes=nnodes or ("1" if nproc == 2 else "2"),
        nproc=nproc,
        script=(SCRIPT, f"--output={job.directory}", *names),
        compare_every=1,
        max_restarts=100,
        min_uptime=0,  # they are killed on purpose: nobody is to wait
        lease_ttl=20,  # the machine may be busy
        env={
            "FAULT": fault,
            "DIRECTORY": str(directory),
            "OMP_NUM_THREADS": "1",
            "BATCH": str(batch),
            "STEPS": str(CALM if names == RIGHT else STEPS),
        },  # sums of one order, on any node
    )


@pytest.fixture(scope="module")
def undisturbed() -> Curve:
    return {}


@pytest.fixture
def whole(undisturbed: Curve, jobs: Callable[..., Job]) -> Curve:
    """The curve of a run without any fault."""
    if not undisturbed:
        job = jobs()
        job.exits(start(job, "", nproc=2), 0, PATIENCE)
        undisturbed.update(curve(job))
        assert {name for name, _ in undisturbed} == HABITS.keys()
        assert all(len(losses) == 1 for losses in undisturbed.values())
    return undisturbed


def check(found: Curve, whole: Curve, again: int) -> None:
    assert found.keys() == whole.keys()
    others = {key: found[key] for key in whole if set(found[key]) != set(whole[key])}
    assert others == {}, "losses that are not those of the undisturbed run"
    for name in {name for name, _ in whole}:
        losses = [found[key] for key in found if key[0] == name]
        assert sum(map(len, losses)) - len(losses) <= again, name


def test_workers_are_killed(whole: Curve, jobs: Callable[..., Job]) -> None:
    job = jobs()
    job.exits(start(job, "worker", nproc=2), 0, PATIENCE)
    check(curve(job), whole, again=2 * AGAIN)
    assert (
        len(list(job.directory.glob("*-4"))) == len(list(job.directory.glob("*-9"))) == len(HABITS)
    )


@pytest.mark.parametrize("planned", [False, True], ids=["is lost", "leaves"])
def test_a_node_goes_and_another_one_joins(
    whole: Curve, jobs: Callable[..., Job], planned: bool
) -> None:
    job = jobs()
    nodes = [start(job, "node"), start(job, "node")]
    for name in HABITS:
        waits = job.directory / f"{name}-waits"
        job.wait(f"step 4 of {name}", waits.exists, PATIENCE)
        node = nodes.pop(0)
        if planned:
            node.terminate()
        else:
            node.node_kill()
        nodes.append(start(job, "node"))
        (job.directory / f"{name}-goes-on").touch()
        if planned:
            job.exits(node, 128 + signal.SIGTERM, PATIENCE)
    for node in nodes:
        job.exits(node, 0, PATIENCE)
    check(curve(job), whole, again=0 if planned else AGAIN)


def test_a_node_joins_and_the_world_grows(jobs: Callable[..., Job]) -> None:
    """Steps are of more samples then; every training goes on to its end in the larger world.

    But for one whose BatchNorm refuses a last batch of one sample, which is the script's to avoid.
    """
    job = jobs()
    names = tuple(name for name in HABITS if name != "curriculum")
    nodes = [start(job, "node", nnodes="2:3", names=names) for _ in range(2)]
    first, *others = names
    job.wait(f"step 4 of {first}", (job.directory / f"{first}-waits").exists, PATIENCE)
    nodes.append(start(job, "node", nnodes="2:3", names=names))
    job.said(nodes[0], "n3 joins", PATIENCE)
    for name in (first, *others):
        (job.directory / f"{name}-goes-on").touch()
    for node in nodes:
        job.exits(node, 0, PATIENCE)
    worlds = {name: [world for of, *_, world in lines(job) if of == name] for name in names}
    assert set(worlds[first]) == {"2", "3"}
    assert [name for name in others if set(worlds[name]) != {"3"}] == []


def test_t6_trainings_that_are_right_raise_no_alarm(jobs: Callable[..., Job]) -> None:
    job = jobs()
    job.exits(start(job, "", nproc=2, names=RIGHT), 0, 3 * PATIENCE)
    steps = Counter(name for name, *_ in lines(job))
    assert steps == dict.fromkeys(RIGHT, CALM)


@pytest.mark.parametrize("fault", ["worker", "is lost", "leaves"])
@pytest.mark.parametrize(
    ("names", "nproc"), [(("hsdp",), 2), (tuple(SHARDED), 1)], ids=["hsdp", "all"]
)
def test_sharded_values_are_those_of_an_undisturbed_run(
    jobs: Callable[..., Job], fault: str, names: tuple[str, ...], nproc: int
) -> None:
    """Each node has one part, and another node its copy, or its replica."""

    def begin(job: Job, fault: str) -> Agent:
        return start(job, fault, nproc, nnodes="2", names=names, batch=4 // nproc)

    job = jobs()
    for node in [begin(job, "") for _ in range(2)]:
        job.exits(node, 0, PATIENCE)
    whole = curve(job, 2 * nproc)
    job = jobs()
    nodes = [begin(job, "worker" if fault == "worker" else "node") for _ in range(2)]
    for name in names if fault != "worker" else ():
        job.wait(f"step 4 of {name}", (job.directory / f"{name}-waits").exists, PATIENCE)
        node = nodes.pop(0)
        if fault == "leaves":
            node.terminate()
        else:
            node.node_kill()
        nodes.append(begin(job, "node"))
        (job.directory / f"{name}-goes-on").touch()
        if fault == "leaves":
            job.exits(node, 128 + signal.SIGTERM, PATIENCE)
    for node in nodes:
        job.exits(node, 0, PATIENCE)
    again = {"worker": 2 * AGAIN, "is lost": AGAIN, "leaves": 0}[fault]
    check(curve(job, 2 * nproc), whole, again)


def test_sharded_values_outlive_a_job_that_is_killed_whole(jobs: Callable[..., Job]) -> None:
    """All nodes are lost, and with them each commit; others go on from the directory."""
    job = jobs()
    job.exits(start(job, "", 2, names=("fsdp",)), 0, PATIENCE)
    whole = curve(job)
    job = jobs()
    saved = job.directory / "saved"
    nodes = [start(job, "node", names=("fsdp",), directory=saved) for _ in "12"]
    job.wait("step 4", (job.directory / "fsdp-waits").exists, PATIENCE)
    job.wait("a checkpoint", lambda: bool(list(saved.glob("commit-?"))), PATIENCE)
    for node in nodes:
        node.node_kill()
    nodes = [start(job, "node", names=("fsdp",), directory=saved) for _ in "34"]
    for node in nodes:
        job.exits(node, 0, PATIENCE)
    check(curve(job), whole, again=AGAIN)
