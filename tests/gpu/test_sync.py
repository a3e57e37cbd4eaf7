"""Ranks whose state is on devices agree on the newest, by each backend."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_etcd.train.state import sync
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.forked import Child, commit_alone, group
from tests.support.places import Place, places

PATIENCE = 120
LARGE = 100_000
SIZE = 3

pytestmark = [pytest.mark.timeout(4 * PATIENCE), pytest.mark.nightly(part="gpu")]


def synced(rank: int, folder: Path, place: Place) -> list[Any]:
    """What this rank has after each sync."""
    device = place.take(rank)
    sync.BUCKET = 1 << 17  # so that the snapshot is several
    torch.manual_seed(rank)
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    large = torch.full((LARGE,), float(rank), device=device)
    state = ElasticState(model=model, optimizer=optimizer, large=large, step=rank)
    found = []
    with group(rank, SIZE, folder, place.backend):
        state.sync()  # nobody has committed: rank 0's
        found.append(what_it_has(state, device))
        if rank == SIZE - 1:  # one has trained on
            model(torch.ones(1, 64, device=device)).sum().backward()
            optimizer.step()
            state.large += 5
            state.step = 7
            commit_alone(state)
        state.sync()
        found.append(what_it_has(state, device))
        if rank == 1:  # as a weight that has rotted; the lowest rank's counts
            state.large[3] = 1e9
        state.commit()
        state.sync()
        found.append(what_it_has(state, device))
    return found


def what_it_has(state: ElasticState, device: torch.device) -> list[Any]:
    moments = [t for row in state.optimizer.state.values() for t in row.values()]
    tensors = [*state.model.state_dict().values(), *moments, state.large]
    assert {t.device for t in tensors if t.dim()} == {device}
    return [state.step, *(t.double().sum().item() for t in tensors)]


@pytest.mark.parametrize("place", places(ranks=SIZE))
def test_all_have_the_newest(place: Place, tmp_path: Path) -> None:
    children = [Child(synced, rank, tmp_path, place) for rank in range(SIZE)]
    first, *others = [child.result(PATIENCE) for child in children]
    assert all(other == first for other in others)
    begun, trained, compared = first
    assert (begun[0], begun[-1]) == (0, 0)
    assert (trained[0], trained[-1]) == (7, 5 * LARGE)
    assert len(trained) > len(begun), "no moments have come with it"
    assert compared == trained
