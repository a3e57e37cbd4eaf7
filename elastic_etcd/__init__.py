"""Elastic PyTorch DDP training, coordinated through etcd v3.

Each name is loaded when a training script asks for it: the launcher imports this package, too, and
never loads torch.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

from elastic_etcd.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_etcd.errors import (
        AgentGone,
        EtcdUnreachable,
        MalformedState,
        StaleGeneration,
        UsageError,
    )
    from elastic_etcd.train.agent_channel import leaving, raise_if_stale
    from elastic_etcd.train.checkpoint.latest_checkpoint import latest_checkpoint
    from elastic_etcd.train.checkpoint.memory_checkpoint import memory_checkpoint
    from elastic_etcd.train.collectives import store
    from elastic_etcd.train.data.batch_sampler import ElasticBatchSampler, accumulation_steps
    from elastic_etcd.train.data.iterable import ElasticIterable
    from elastic_etcd.train.data.sampler import ElasticSampler
    from elastic_etcd.train.data.seed import seed_all
    from elastic_etcd.train.data.source import steps_per_epoch
    from elastic_etcd.train.ddp import ddp
    from elastic_etcd.train.heartbeat import heartbeat, quiet
    from elastic_etcd.train.run import run
    from elastic_etcd.train.scale_lr import scale_lr
    from elastic_etcd.train.sharded.built import BuildWorld
    from elastic_etcd.train.state.elastic_state import ElasticState
    from elastic_etcd.train.sync_point import WorldChanged

__all__ = ["BuildWorld", "ElasticState", "WorldChanged", "ddp", "run"]
__all__ += ["ElasticBatchSampler", "ElasticIterable", "ElasticSampler"]
__all__ += ["accumulation_steps", "scale_lr", "seed_all", "steps_per_epoch"]
__all__ += ["latest_checkpoint", "memory_checkpoint"]
__all__ += ["heartbeat", "leaving", "quiet", "raise_if_stale", "store"]
__all__ += ["AgentGone", "EtcdUnreachable", "MalformedState", "StaleGeneration", "UsageError"]
_HOMES = {
    "BuildWorld": "train.sharded.built",
    "ElasticBatchSampler": "train.data.batch_sampler",
    "ElasticIterable": "train.data.iterable",
    "ElasticSampler": "train.data.sampler",
    "ElasticState": "train.state.elastic_state",
    "WorldChanged": "train.sync_point",
    "accumulation_steps": "train.data.batch_sampler",
    "ddp": "train.ddp",
    "heartbeat": "train.heartbeat",
    "latest_checkpoint": "train.checkpoint.latest_checkpoint",
    "leaving": "train.agent_channel",
    "memory_checkpoint": "train.checkpoint.memory_checkpoint",
    "quiet": "train.heartbeat",
    "raise_if_stale": "train.agent_channel",
    "run": "train.run",
    "scale_lr": "train.scale_lr",
    "seed_all": "train.data.seed",
    "steps_per_epoch": "train.data.source",
    "store": "train.collectives",
}

if not TYPE_CHECKING:  # a checker would take every name for there

    def __getattr__(name):  # noqa: ANN001, ANN202 - checkers do not read it
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
