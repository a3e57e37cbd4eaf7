"""ee.scale_lr: a learning rate that follows the global batch, where that changes with the world."""

from collections.abc import Callable
from typing import Any, Literal

from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import World

_RULES = {"linear": 1.0, "sqrt": 0.5}  # to which power the ratio of the batches counts
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # of a group, by torch and its schedulers
# In a group, so that a commit has them: the share of its rate with which the warm-up began, and
# the steps of that which are left. One that is added or loaded may have neither.
_FROM, _LEFT = "warmup_from", "warmup_left"


def scale_lr(
    optimizer: Any,
    *,
    rule: Literal["linear", "sqrt"] = "linear",
    warmup: int = 0,
    scheduler: Any = None,
) -> Callable[[World, World], None]:
    """Make a callback of on_reset that scales the learning rate with the number of ranks.

        state = ee.ElasticState(model=model, optimizer=optimizer, scheduler=scheduler)
        state.on_reset(ee.scale_lr(optimizer, rule="sqrt", warmup=200, scheduler=scheduler))

    For scripts that keep the batch of each rank, so that the global batch grows and shrinks with
    the world; those that keep the global batch (ee.accumulation_steps) need none of this. Each
    group's rate is multiplied by new / old world size, or by the square root of that with "sqrt".
    The rates that the script sets are those of the world it begins in, and those of a group that it
    adds later are for the world of that moment. Call it once, outside of the training.

    optimizer: torch's; it is in the state. warmup: so many steps of the optimizer take rates that
    go evenly from the old to the new one. scheduler: a learning rate scheduler in the state, whose
    `base_lrs` are scaled, too. Raises UsageError for another rule and for less than no step.
    """
    if rule not in _RULES or warmup < 0:
        raise UsageError(f'scale_lr(rule={rule!r}, warmup={warmup}): "linear" or "sqrt", from 0 on')
    return _Scaled(optimizer, _RULES[rule], warmup, scheduler).scale


class _Scaled:
    """An optimizer whose rates follow the world."""

    def __init__(self, optimizer: Any, power: float, warmup: int, scheduler: Any) -> None:
        self._optimizer, self._power, self._warmup = optimizer, power, warmup
        self._schedulers = (scheduler, *getattr(scheduler, "_schedulers", ()))
        self._rates: list[Any] = []  # of the groups, during a step of a warm-up
        for group in optimizer.param_groups:
            group.setdefault(_FROM, 1.0)
            group.setdefault(_LEFT, 0)
        optimizer.register_step_pre_hook(self._begin_step)
        optimizer.register_step_post_hook(self._end_step)

    def scale(self, old: World, new: World) -> None:
        """The world has changed: on_reset calls this, alike on all ranks."""
        factor = (new.world_size / old.world_size) ** self._power
        if factor == 1.0:
            return
        for group in self._optimizer.param_groups:
            share = self._share(group)
            for name in _RATES:
                if name in group:
                    group[name] = group[name] * factor
            group[_FROM], group[_LEFT] = share / factor, self._warmup
        for scheduler in self._schedulers:
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]

    def _begin_step(self, *_: object) -> None:
        groups, self._rates = self._optimizer.param_groups, []
        if any(group.get(_LEFT, 0) for group in groups):
            self._rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * self._share(group)

    def _end_step(self, *_: object) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            group["lr"], group[_LEFT] = rate, max(0, group.get(_LEFT, 0) - 1)
        self._rates = []

    def _share(self, group: dict[str, Any]) -> float:
        """The part of a group's rate that its next step takes."""
        left = group.get(_LEFT, 0) / self._warmup if self._warmup else 0.0
        return float(1.0 + (group.get(_FROM, 1.0) - 1.0) * min(1.0, left))
