"""ee.ddp: a module that is wrapped once and trained in one world after another.

And what DistributedDataParallel reduces when it is made anew for a world that begins in the middle.
"""

import weakref
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp(module: nn.Module, **options: Any) -> "ElasticDDP":
    """Wrap `module` for all worlds; `options` are DistributedDataParallel's.

        model = ee.ddp(Net().to(device), gradient_as_bucket_view=True)
        state = ee.ElasticState(model=model, optimizer=optimizer)

    It is for outside of the function that ee.run decorates. Inside of it everything is made anew
    for each world, and DistributedDataParallel itself does as well. Raises the errors of
    DistributedDataParallel, when a world begins. A copy, such as an average of the weights, is a
    plain module until it is trained: its own DistributedDataParallel is made at the first use with
    gradients, on all ranks at the same time, in each world.
    """
    return ElasticDDP(module, **options)


class ElasticDDP(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A module whose DistributedDataParallel is made anew at the beginning of each world.

    Parameters, buffers and state_dict are named as DistributedDataParallel names them.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._options = options
        self._made: tuple[DistributedDataParallel] | None = None  # a tuple is no submodule
        self._is_copy = False
        _all[self] = dist.is_initialized()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Keep a copy out of what is made when a world begins: one rank alone may have it."""
        super().__setstate__(state)
        _all[self] = self._is_copy = True

    @property
    def ddp(self) -> DistributedDataParallel:
        """This world's DistributedDataParallel. Don't hold it beyond the world.

        A module that was wrapped inside of a world has it from its first use on, on all ranks at
        the same time.
        """
        if self._made is None:
            self._made = (DistributedDataParallel(self.module, **self._options),)
        return self._made[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call DistributedDataParallel's; of a copy that is not trained, the module's."""
        if self._is_copy and not self._made and not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        return self.ddp(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Call DistributedDataParallel's."""
        return self.ddp.no_sync()  # type: ignore[no-any-return]


# Whether it was wrapped inside of a world, or copied. Others are in one order on all ranks.
_all: "weakref.WeakKeyDictionary[ElasticDDP, bool]" = weakref.WeakKeyDictionary()


def make() -> None:
    """At a world's beginning make what was wrapped outside of it, on all ranks in one order.

    At the first use it might be too late: an evaluation on rank 0 alone would wait for the others.
    """
    for module, inside in list(_all.items()):
        if not inside:
            _ = module.ddp


def forget() -> None:
    """Drop the modules that were made for a world, which is over."""
    for module in _all:
        module._made = None  # noqa: SLF001 - this file's


# Of a parameter: whether its DistributedDataParallel reduces it, and whether the next one around it
# is to, though it is frozen.
_REDUCED, _REDUCE = "_elastic_etcd_reduced", "_elastic_etcd_reduce"


def is_reduced(parameter: nn.Parameter) -> bool:
    """Whether its DistributedDataParallel reduces it: it was not frozen when that was made."""
    return getattr(parameter, _REDUCED, False)


def reduce_next(parameter: nn.Parameter, *, wanted: bool) -> None:
    """Let the next DistributedDataParallel reduce a parameter that is frozen at that moment.

    A training begins anew from a commit, at which a GAN's other half may have been frozen.
    """
    setattr(parameter, _REDUCED, wanted)  # alike in a process that starts anew and in the others
    setattr(parameter, _REDUCE, wanted)


_make = DistributedDataParallel.__init__


@wraps(_make)
def _make_as_before(self: Any, module: nn.Module, *args: Any, **options: Any) -> None:
    frozen = [
        each
        for each in module.parameters()
        if vars(each).pop(_REDUCE, False) and not each.requires_grad
    ]
    for each in frozen:
        each.requires_grad = True
    try:
        _make(self, module, *args, **options)
        for each in module.parameters():
            setattr(each, _REDUCED, each.requires_grad)
    finally:
        for each in frozen:
            each.requires_grad = False


DistributedDataParallel.__init__ = _make_as_before
