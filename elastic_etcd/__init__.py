"""Elastic PyTorch DDP training, coordinated through etcd v3.

What a training script uses is loaded when it is asked for: the launcher imports this package,
too, and never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_etcd.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_etcd.train.accumulation import accumulation_steps as accumulation_steps
    from elastic_etcd.train.batch_sampler import ElasticBatchSampler as ElasticBatchSampler
    from elastic_etcd.train.channel import current as current
    from elastic_etcd.train.channel import leaving as leaving
    from elastic_etcd.train.ddp import ddp as ddp
    from elastic_etcd.train.heartbeat import heartbeat as heartbeat
    from elastic_etcd.train.heartbeat import quiet as quiet
    from elastic_etcd.train.iterable import ElasticIterable as ElasticIterable
    from elastic_etcd.train.memory import memory_checkpoint as memory_checkpoint
    from elastic_etcd.train.memory_sync import latest_checkpoint as latest_checkpoint
    from elastic_etcd.train.run import run as run
    from elastic_etcd.train.sampler import ElasticSampler as ElasticSampler
    from elastic_etcd.train.seed import seed_all as seed_all
    from elastic_etcd.train.state import ElasticState as ElasticState
    from elastic_etcd.train.steps import steps_per_epoch as steps_per_epoch
    from elastic_etcd.train.store import store as store
    from elastic_etcd.train.sync_point import WorldChanged as WorldChanged

_HOMES = {
    "ElasticBatchSampler": "batch_sampler",
    "ElasticIterable": "iterable",
    "ElasticSampler": "sampler",
    "ElasticState": "state",
    "WorldChanged": "sync_point",
    "accumulation_steps": "accumulation",
    "current": "channel",
    "ddp": "ddp",
    "heartbeat": "heartbeat",
    "latest_checkpoint": "memory_sync",
    "leaving": "channel",
    "memory_checkpoint": "memory",
    "quiet": "heartbeat",
    "run": "run",
    "seed_all": "seed",
    "steps_per_epoch": "steps",
    "store": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
