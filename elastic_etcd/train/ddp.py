"""ee.ddp: a module that is wrapped once and trained in one world after another."""

import weakref
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp(module: nn.Module, **options: Any) -> "ElasticDDP":
    """Wrap `module` for all worlds; `options` are DistributedDataParallel's.

    It is for outside of the function that ee.run decorates. Inside of it, where all is made anew
    for each world, DistributedDataParallel itself does as well.
    """
    return ElasticDDP(module, **options)


class ElasticDDP(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A module whose DistributedDataParallel is made anew in each world, at its first use.

    Parameters, buffers and state_dict are named as DistributedDataParallel names them.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._options = options
        self._made: tuple[DistributedDataParallel] | None = None  # a tuple is no submodule
        _all.add(self)

    @property
    def ddp(self) -> DistributedDataParallel:
        """This world's DistributedDataParallel; all ranks make it at the same time.

        Don't hold it beyond the world.
        """
        if self._made is None:
            self._made = (DistributedDataParallel(self.module, **self._options),)
        return self._made[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call DistributedDataParallel's."""
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Call DistributedDataParallel's."""
        return self.ddp.no_sync()  # type: ignore[no-any-return]


_all: "weakref.WeakSet[ElasticDDP]" = weakref.WeakSet()


def forget() -> None:
    """Drop the modules that were made for a world, which is over."""
    for module in _all:
        module._made = None  # noqa: SLF001 - this file's
