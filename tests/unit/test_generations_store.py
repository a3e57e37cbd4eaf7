"""`ee.store`: one store for all ranks of a generation, out of the way of others' keys."""

import pytest
import torch.distributed as dist

import elastic_etcd as ee


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    for name in ("TORCHELASTIC_RESTART_COUNT", "ELASTIC_ETCD_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    return server


def test_ranks_share_it_and_torch_does_not_see_it(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "4")
    ee.store().set("key", "value")
    assert ee.store().get("key") == b"value"
    assert not server.check(["key"])


@pytest.mark.parametrize("counter", ["TORCHELASTIC_RESTART_COUNT", "ELASTIC_ETCD_GENERATION"])
def test_the_next_generation_has_another(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, counter: str
) -> None:
    """Torchrun goes on with the same server."""
    monkeypatch.setenv(counter, "1")
    ee.store().set("key", "value")
    monkeypatch.setenv(counter, "2")
    assert not ee.store().check(["key"])


def test_without_a_launcher_it_is_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert ee.store().add("count", 1) + 1 == ee.store().add("count", 1)
