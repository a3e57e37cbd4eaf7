"""Commit and restore of tensors on a device, against a plain copy of them in host memory."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_etcd.train.state.elastic_state import ElasticState
from elastic_etcd.train.state.replicas import digests_of
from elastic_etcd.train.state.snapshot_bytes import BUFFER
from tests.support.forked import Child
from tests.support.places import Place, devices

PATIENCE = 120
WIDTH = 96
LARGE = {"cpu": 1 << 16, "cuda": 3 * BUFFER // 4 + 5}  # float32: on a GPU more than both buffers

pytestmark = [
    pytest.mark.nightly(part="gpu"),
    pytest.mark.timeout(2 * PATIENCE),
    pytest.mark.parametrize("place", devices()),
]


def made(device: torch.device) -> ElasticState:
    """A training's state after a step, with tensors of many kinds beside it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, WIDTH, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return ElasticState(
        model=model,
        optimizer=optimizer,
        large=torch.randn(LARGE[device.type], device=device),
        half=torch.randn(1001, device=device, dtype=torch.bfloat16),
        flags=torch.rand(777, device=device) < 0.5,
        strided=torch.randn(40, 30, device=device).t()[3:, ::2],
        empty=torch.empty(0, 4, device=device),
        epoch=3,
    )


def tensors(state: ElasticState) -> Iterator[tuple[str, Tensor]]:
    yield from state.model.state_dict().items()
    for number, row in state.optimizer.state_dict()["state"].items():
        yield from ((f"optimizer.{number}.{name}", tensor) for name, tensor in row.items())
    yield from ((name, getattr(state, name)) for name in PLAIN)


PLAIN = ("large", "half", "flags", "strided", "empty")


def host_copy(state: ElasticState) -> dict[str, Tensor]:
    """What torch itself brings into host memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors(state)}


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    differ = [name for name in found if not torch.equal(found[name], expected[name])]
    assert differ == []


def spoil(state: ElasticState) -> None:
    """Change every tensor in its place."""
    with torch.no_grad():
        for _, tensor in tensors(state):
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)


def in_a_process(function: Callable[[torch.device], Any], place: Place) -> Any:
    """In one of its own: an error of CUDA's ends all that CUDA does in its process."""
    return Child(_taken, function, place).result(PATIENCE)


def _taken(function: Callable[[torch.device], Any], place: Place) -> Any:
    return function(place.take(0))


def committed_and_restored(device: torch.device) -> None:
    state = made(device)
    where = {name: t.data_ptr() for name, t in state.model.state_dict().items()}
    for _ in range(3):  # into each of the two halves, and once more
        expected = host_copy(state)
        state.commit()
        spoil(state)
        state.restore()
        same_bits(host_copy(state), expected)
        spoil(state)
    assert {name: t.data_ptr() for name, t in state.model.state_dict().items()} == where
    assert {getattr(state, name).device for name in PLAIN} == {device}
    moments = state.optimizer.state_dict()["state"][0]
    assert moments["exp_avg"].device == device


def test_what_is_restored_is_what_a_plain_copy_has(place: Place) -> None:
    in_a_process(committed_and_restored, place)


def queued_before_a_commit(device: torch.device) -> None:
    """The commit is called while the device is still about to compute what is committed."""
    state = made(device)
    state.commit()
    state.large.zero_()
    for _ in range(20):
        if device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # cycles
        state.large.add_(1)
    state.commit()
    state.large.zero_()
    state.restore()
    assert bool((state.large == 20).all())


def test_a_commit_waits_for_what_is_queued(place: Place) -> None:
    in_a_process(queued_before_a_commit, place)


def frozen_and_then_changed(device: torch.device) -> None:
    """A tensor that does not train, and that has not changed for some commits."""
    state = made(device)
    for parameter in state.model[0].parameters():
        parameter.requires_grad_(False)
    for _ in range(6):
        state.commit()
    with torch.no_grad():
        state.model[0].weight[5, 7] = 42
    expected = host_copy(state)
    for _ in range(2):
        state.commit()
        spoil(state)
        state.restore()
        same_bits(host_copy(state), expected)


def test_a_frozen_weight_that_changes_is_committed(place: Place) -> None:
    in_a_process(frozen_and_then_changed, place)


def of_digests(device: torch.device) -> None:
    state = made(device)
    found = dict(tensors(state))
    here, there = (digests_of([*each.values()]) for each in (found, host_copy(state)))
    assert here == there
    spoil(state)
    others = digests_of([*found.values()])
    assert [a == b for a, b in zip(here, others, strict=True)] == [
        t.numel() == 0 for t in found.values()
    ]


def test_t6_a_digest_is_the_same_wherever_the_tensors_are(place: Place) -> None:
    in_a_process(of_digests, place)
