"""Elastic PyTorch DDP training, coordinated through etcd v3.

Each name is loaded when a training script asks for it: the launcher imports this package, too, and
never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_etcd.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_etcd.train.agent_channel import current as current
    from elastic_etcd.train.agent_channel import leaving as leaving
    from elastic_etcd.train.checkpoint.latest_checkpoint import (
        latest_checkpoint as latest_checkpoint,
    )
    from elastic_etcd.train.checkpoint.memory_checkpoint import (
        memory_checkpoint as memory_checkpoint,
    )
    from elastic_etcd.train.collectives import store as store
    from elastic_etcd.train.data.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from elastic_etcd.train.data.batch_sampler import accumulation_steps as accumulation_steps
    from elastic_etcd.train.data.iterable import ElasticIterable as ElasticIterable
    from elastic_etcd.train.data.sampler import ElasticSampler as ElasticSampler
    from elastic_etcd.train.data.seed import seed_all as seed_all
    from elastic_etcd.train.ddp import ddp as ddp
    from elastic_etcd.train.heartbeat import heartbeat as heartbeat
    from elastic_etcd.train.heartbeat import quiet as quiet
    from elastic_etcd.train.run import run as run
    from elastic_etcd.train.scale_lr import scale_lr as scale_lr
    from elastic_etcd.train.state.elastic_state import ElasticState as ElasticState
    from elastic_etcd.train.state.steps import steps_per_epoch as steps_per_epoch
    from elastic_etcd.train.sync_point import WorldChanged as WorldChanged

_HOMES = {
    "ElasticBatchSampler": "data.batch_sampler",
    "ElasticIterable": "data.iterable",
    "ElasticSampler": "data.sampler",
    "ElasticState": "state.elastic_state",
    "WorldChanged": "sync_point",
    "accumulation_steps": "data.batch_sampler",
    "current": "agent_channel",
    "ddp": "ddp",
    "heartbeat": "heartbeat",
    "latest_checkpoint": "checkpoint.latest_checkpoint",
    "leaving": "agent_channel",
    "memory_checkpoint": "checkpoint.memory_checkpoint",
    "quiet": "heartbeat",
    "run": "run",
    "scale_lr": "scale_lr",
    "seed_all": "data.seed",
    "steps_per_epoch": "state.steps",
    "store": "collectives",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
