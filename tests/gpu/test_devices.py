"""A device is tried by `elastic-etcd check`."""

import pytest
import torch

from elastic_etcd.children import node_probe
from tests.support.places import Place, devices

pytestmark = pytest.mark.nightly(part="gpu")


@pytest.mark.parametrize("place", devices())
def test_a_device_computes_right(place: Place) -> None:
    node_probe.compute(torch, str(place.take(0)), 256)


@pytest.mark.parametrize("place", devices())
def test_a_device_that_computes_wrong_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        right = torch.mm(a, b)
        right[0, :3] += 8
        return right

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    with pytest.raises(ArithmeticError, match="3 of 65536 numbers of a product are wrong"):
        node_probe.compute(torch, str(place.take(0)), 256)


def test_gpus_that_torch_does_not_find_are_told_unless_they_are_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent asks where the machine has some."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert node_probe.devices()[0] == "torch finds none of this machine's GPUs"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert node_probe.devices() == ("0 found, 0 compute right", "")
