"""ee.scale_lr: a learning rate that follows the global batch, where that changes with the world."""

from collections.abc import Callable
from typing import Any, Literal

from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import World

_RULES = {"linear": 1.0, "sqrt": 0.5}  # to which power the ratio of the batches counts
# The rates that torch has in a group, and in a scheduler: there for each group, or for all.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULED = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min")
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
    rates are scaled, too: one of torch's, or of one's own that has its `base_lrs`. Raises
    UsageError for another scheduler, another rule and less than no step.
    """
    if rule not in _RULES or warmup < 0:
        raise UsageError(f'scale_lr(rule={rule!r}, warmup={warmup}): "linear" or "sqrt", from 0 on')
    return _Scaled(optimizer, _RULES[rule], warmup, scheduler).scale


class _Scaled:
    """An optimizer whose rates follow the world."""

    def __init__(self, optimizer: Any, power: float, warmup: int, scheduler: Any) -> None:
        self._optimizer, self._power, self._warmup = optimizer, power, warmup
        self._schedulers = [] if scheduler is None else _each_in(scheduler)
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
            for name, rate in _rates_of(scheduler).items():
                each = isinstance(rate, (list, tuple))
                setattr(scheduler, name, [r * factor for r in rate] if each else rate * factor)

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


def _each_in(scheduler: Any) -> list[Any]:
    """It and those that it is made of, which torch lets be nested. Raises UsageError."""
    parts = getattr(scheduler, "_schedulers", ())
    if not parts and not _rates_of(scheduler):
        named = f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
        raise UsageError(
            f"scale_lr(scheduler={named}): it has no base_lrs to scale: give the one of torch's "
            "that it wraps, or scale its rates in a callback of your own by state.on_reset"
        )
    return [scheduler, *(each for part in parts for each in _each_in(part))]


def _rates_of(scheduler: Any) -> dict[str, Any]:
    """The rates that a scheduler has itself, beside those in the groups."""
    return {k: v for k, v in vars(scheduler).items() if k in _SCHEDULED and v is not None}
