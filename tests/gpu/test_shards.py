"""Sharded state whose parts are on devices: over NCCL, by several ranks of one GPU where it is new
enough.
"""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_etcd.train.sharded.built import BuildWorld
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.forked import Child, group
from tests.support.job import ROOT, TRAINERS, Agent, Job
from tests.support.places import Place, nccl_beside_gloo, places
from tests.support.processes import send
from tests.support.savers import outlives_a_kill_a_loss_and_a_join, start
from tests.support.sharded_worlds import live

PATIENCE = 120
PROCESSES = 4
EXAMPLE = str(ROOT / "examples" / "fsdp2_elastic.py")
SMALL = ("--samples=1024", "--width=32", "--depth=2", "--batch=16", "--commit-every=2")
LOSS = re.compile(r"epoch (\d+)  world (\d+)  loss (\S+)")

pytestmark = [pytest.mark.nightly(part="gpu"), pytest.mark.timeout(4 * PATIENCE)]


def lived(process: int, folder: Path, place: Place) -> list[str]:
    place.take(process)
    return live(process, folder, range(2, 6), PROCESSES, place.backend)


@pytest.mark.parametrize("place", places(ranks=PROCESSES))
def test_a_world_of_any_size_goes_on_from_the_last_commit(tmp_path: Path, place: Place) -> None:
    children = [Child(lived, process, tmp_path, place) for process in range(PROCESSES)]
    assert [child.result(PATIENCE) for child in children] == [[]] * PROCESSES


def device_of_a_world(place: Place, folder: Path) -> bool:
    device = place.take(0)
    found = []

    def build(world: BuildWorld) -> dict[str, Any]:
        found.append(world.device)
        return {}

    with group(0, 1, folder, place.backend):
        ElasticState(build=build).sync()
    return found == [device if "nccl" in place.backend else torch.device("cpu")]


@pytest.mark.parametrize("place", places(ranks=1))
def test_values_are_made_where_training_is(tmp_path: Path, place: Place) -> None:
    assert Child(device_of_a_world, place, tmp_path).result(PATIENCE)


def trained(job: Job) -> dict[int, tuple[int, float]]:
    """World size and loss of each epoch, as the example has printed them last."""
    found = LOSS.findall("".join(agent.output for agent in job.agents))
    return {int(epoch): (int(world), float(loss)) for epoch, world, loss in found}


@pytest.mark.parametrize("place", [places(ranks=3)[0], places(ranks=3)[-1]])
def test_the_example_trains_through_a_kill_a_loss_and_a_join(jobs: Any, place: Place) -> None:
    def node(job: Job, name: str, epochs: int) -> Agent:
        script = (EXAMPLE, *SMALL, f"--epochs={epochs}")
        env = place.env | {"OMP_NUM_THREADS": "1"}
        flags: dict[str, Any] = {
            "join_settle": 0,
            "min_uptime": 0,
            "start_method": "exec",
            "settle": 1,
        }
        return job.start(name, nproc=1, nnodes="2:3", script=script, env=env, **flags)

    epochs = 15
    calm = jobs()
    for agent in [node(calm, name, epochs) for name in ("n1", "n2")]:
        calm.exits(agent, 0, PATIENCE)

    job = jobs()
    agents = {name: node(job, name, epochs) for name in ("n1", "n2")}
    job.wait("an epoch", lambda: len(trained(job)) > 1, PATIENCE)
    (worker,) = agents["n2"].programs("examples/fsdp2_elastic.py")
    send(signal.SIGKILL, [worker])
    seen = len(trained(job))
    job.wait("two epochs more", lambda: len(trained(job)) > seen + 1, PATIENCE)
    agents["n3"] = node(job, "n3", epochs)
    job.wait("a world of three", lambda: 3 in worlds(job), PATIENCE)
    agents.pop("n1").node_kill()
    for agent in agents.values():
        job.exits(agent, 0, PATIENCE)
    assert list(trained(job)) == list(range(1, epochs + 1))
    (_, last), (_, calm_last) = trained(job)[epochs], trained(calm)[epochs]
    assert last == pytest.approx(calm_last, rel=0.2)


def worlds(job: Job) -> set[int]:
    return {world for world, _ in trained(job).values()}


@pytest.mark.parametrize("script", ["sharded_saver", "sharded_accelerate", "sharded_lightning"])
def test_a_plain_script_goes_on_from_what_nodes_have_in_memory(job: Job, script: str) -> None:
    """A killed worker, a lost node and a join."""
    place = nccl_beside_gloo(3)
    if script != "sharded_saver":
        pytest.importorskip(script.removeprefix("sharded_"))

    def node(name: str) -> Agent:
        program = TRAINERS / f"{script}.py"
        return start(job, name, program=program, nnodes="2:3", env=place.env)

    outlives_a_kill_a_loss_and_a_join(job, node, world=3, seconds=PATIENCE)
