"""Devices that are not CUDA's: torch's other names for them are used, as far as a CPU can show."""

import pytest
import torch
import torch.distributed as dist

from elastic_etcd.train import accelerator, collectives, process_group
from elastic_etcd.train.state.encoding import decode, encode


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch says where there are four of Intel's; gives those that were made the current."""
    current: list[int] = [1]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 4)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.xpu, "set_device", current.append)
    return current


def test_without_another_it_is_cuda_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.devices() is torch.cuda
    monkeypatch.delattr(torch, "accelerator")  # before torch 2.6
    assert accelerator.devices() is torch.cuda


@pytest.mark.parametrize("backend", ["xccl", "cpu:gloo,xpu:xccl"])
def test_each_worker_has_its_own(xpu: list[int], backend: str) -> None:
    assert process_group._prepare(backend, 3, {}) == backend
    assert xpu[-1] == 3
    assert accelerator.current_device() == torch.device("xpu", 3)


def test_collectives_are_given_its_memory(xpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "xpu:xccl")
    assert collectives.device_of() == torch.device("xpu", 1)


def test_a_device_in_a_state_is_each_rank_s_own(xpu: list[int]) -> None:
    assert decode(encode(torch.device("xpu", 3), {}), {}) == torch.device("xpu", 1)
    assert decode(encode(torch.device("cuda", 3), {}), {}) == torch.device("cuda", 3)
