"""DistributedDataParallel for a module that outlives its world."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def ddp(module: nn.Module, **options: Any) -> "ElasticDDP":
    """Wrap a module once, outside of the function that ee.run decorates.

    `options` are DistributedDataParallel's. Inside that function DistributedDataParallel itself
    does as well.
    """
    return ElasticDDP(module, **options)


class ElasticDDP(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A module whose DistributedDataParallel is made anew in each world, at its first use.

    Its parameters, buffers and state_dict are those of `module`, without a prefix of DDP's but
    with "module.". Other attributes are DistributedDataParallel's: no_sync, join, and so on.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._options = options
        self._made: tuple[Any, DistributedDataParallel] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._ddp()(*args, **kwargs)

    def _ddp(self) -> DistributedDataParallel:
        group = dist.group.WORLD
        if self._made is None or self._made[0] is not group:
            self._made = None
            # A tuple, so that it is no submodule, which would show all parameters twice.
            self._made = group, DistributedDataParallel(self.module, **self._options)
        return self._made[1]

    def __getattr__(self, name: str) -> Tensor | nn.Module | Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._ddp(), name)
