"""Elastic PyTorch DDP training, coordinated through etcd v3.

What a training script uses is loaded when it is asked for: the launcher imports this package,
too, and never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastic_etcd.version import __version__ as __version__

if TYPE_CHECKING:
    from elastic_etcd.train.accumulation import accumulation_steps as accumulation_steps
    from elastic_etcd.train.ddp import ddp as ddp
    from elastic_etcd.train.run import run as run
    from elastic_etcd.train.sampler import ElasticSampler as ElasticSampler
    from elastic_etcd.train.state import ElasticState as ElasticState
    from elastic_etcd.train.sync_point import WorldChanged as WorldChanged

_HOMES = {
    "ElasticSampler": "sampler",
    "ElasticState": "state",
    "WorldChanged": "sync_point",
    "accumulation_steps": "accumulation",
    "ddp": "ddp",
    "run": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
