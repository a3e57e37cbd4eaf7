"""A job on the nodes of the compose project; afterwards all of it is as it was."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.job import DDP
from tests.support.residue import passed

from .engine import Container, containers
from .job import ENDPOINTS, ComposeJob, healthy

NODES = ("node1", "node2", "node3")
MEMBERS = ("etcd1", "etcd2", "etcd3")


@pytest.fixture(scope="session")
def project() -> dict[str, Container]:
    """The containers of docker-compose.yml, by service."""
    if not ENDPOINTS:
        pytest.skip("outside docker-compose.yml's tests service: run scripts/compose-test")
    return containers()


@pytest.fixture
def etcd_members(project: dict[str, Container]) -> Iterator[dict[str, Container]]:
    """The three members; they run and agree afterwards, whatever a test has done to them."""
    members = {name: project[name] for name in MEMBERS}
    yield members
    for member in members.values():
        if member.state()["Paused"]:
            member.unpause()
        member.start()
    healthy(members)


@pytest.fixture
def jobs(
    project: dict[str, Container],
    etcd_members: dict[str, Container],
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., ComposeJob]]:
    """Makes the job of a test; when the test has passed its nodes must end well."""
    made: list[ComposeJob] = []

    def make(trainer: str = DDP, **more: Any) -> ComposeJob:
        made.append(ComposeJob({name: project[name] for name in NODES}, trainer, **more))
        return made[-1]

    yield make
    try:
        if request.node.stash.get(passed, False):
            for job in made:
                job.end()
                job.check()
    finally:
        for job in made:
            job.close()
            for node in job.nodes.values():
                node.reconnect()
