"""One generation after the other in one process, and what is left of each."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from elastic_etcd.train.process_group import ProcessGroup


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_was_not_initialised_leaves_no_name_behind(store: TCPStore) -> None:
    """A group's name is in its keys: a survivor and a fresh process must have the same."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(store.port)}
    group = ProcessGroup(1, env | {"WORLD_SIZE": "2"})
    with pytest.raises(RuntimeError):  # its peer never comes
        group.init("gloo", {"timeout": timedelta(seconds=1)})
    group.teardown(broken=True)
    group.release()
    group = ProcessGroup(2, env | {"WORLD_SIZE": "1"})
    group.init("gloo", {})
    assert dist.group.WORLD.group_name == "0"
    group.teardown(broken=False)
    group.release()
