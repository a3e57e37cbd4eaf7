"""ee.scale_lr: which learning rate each step takes, over any worlds and schedulers."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

import elastic_etcd as ee
from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import World

OLD, NEW, NEXT = World(1, 0, 4), World(2, 0, 8), World(3, -1, 2)


class Job:
    """An optimizer of two groups, and the rates with which its steps are taken."""

    def __init__(self, scheduled: Any = None, **arguments: Any) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        other = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.01}
        self.optimizer = torch.optim.SGD([{"params": [self.weight]}, other], lr=0.1)
        self.scheduler = scheduled(self.optimizer) if scheduled else None
        self.scale = ee.scale_lr(self.optimizer, scheduler=self.scheduler, **arguments)

    def steps(self, count: int) -> list[float]:
        """What they have taken from the weight, whose gradient is 1."""
        taken = []
        for _ in range(count):
            before = self.weight.item()
            self.weight.grad = torch.ones_like(self.weight)
            self.optimizer.step()
            taken.append(before - self.weight.item())
            if self.scheduler:
                self.scheduler.step()
        return taken


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", math.sqrt(2.0))])
def test_t17_the_rate_follows_the_number_of_ranks(rule: Any, factor: float) -> None:
    job = Job(rule=rule)
    job.scale(OLD, NEW)
    assert job.steps(2) == pytest.approx([0.1 * factor] * 2)
    assert job.optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * factor)
    job.scale(NEW, OLD)
    job.scale(OLD, OLD)
    assert job.steps(1) == pytest.approx([0.1])


def test_t17_a_warm_up_goes_evenly_from_the_old_to_the_new_rate() -> None:
    job = Job(warmup=4)
    assert job.steps(1) == pytest.approx([0.1])
    job.scale(OLD, NEW)
    assert job.steps(6) == pytest.approx([0.1, 0.125, 0.15, 0.175, 0.2, 0.2], rel=1e-4)
    assert [group["lr"] for group in job.optimizer.param_groups] == pytest.approx([0.2, 0.02])


def test_t17_a_change_within_a_warm_up_is_not_lost_in_a_snapshot() -> None:
    """A newcomer goes on with the step that a survivor would take."""
    job = Job(warmup=4)
    job.scale(OLD, NEW)
    job.steps(2)
    newcomer = Job(warmup=4)
    newcomer.optimizer.load_state_dict(job.optimizer.state_dict())
    for each in (job, newcomer):
        each.scale(NEW, NEXT)
        assert each.steps(5) == pytest.approx([0.15, 0.125, 0.1, 0.075, 0.05], rel=1e-4)


class Plateau(ReduceLROnPlateau):  # type: ignore[misc]  # torch is not followed
    """Steps without a metric that gets better."""

    def step(self) -> None:
        super().step(1.0)


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: StepLR(o, 3),
    "steps": lambda o: MultiStepLR(o, [1, 4]),
    "constant": lambda o: ConstantLR(o, total_iters=4),
    "linear": LinearLR,
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "polynomial": lambda o: PolynomialLR(o, 6, power=2.0),
    "cosine": lambda o: CosineAnnealingLR(o, 3, eta_min=0.02),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 3, eta_min=0.02),
    "cyclic": lambda o: CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "one_cycle": lambda o: OneCycleLR(o, 0.1, total_steps=11, cycle_momentum=False),
    "plateau": lambda o: Plateau(o, factor=0.5, patience=0, min_lr=[0.03, 0.0]),
    "swa": lambda o: SWALR(o, 0.05, anneal_epochs=4),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, total_iters=5), CosineAnnealingLR(o, 20)], milestones=[5]
    ),
    "chained": lambda o: ChainedScheduler([LinearLR(o), CosineAnnealingLR(o, 9, eta_min=0.01)]),
    "nested": lambda o: ChainedScheduler(
        [SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 3, eta_min=0.02)], milestones=[6])]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("before", [0, 2, 5])
def test_t17_a_scheduler_goes_on_from_the_scaled_rate(name: str, before: int) -> None:
    plain, job = Job(SCHEDULERS[name]), Job(SCHEDULERS[name])
    assert plain.steps(before) == job.steps(before)
    job.scale(OLD, NEW)
    expected = [2 * taken for taken in plain.steps(11 - before)]
    assert job.steps(11 - before) == pytest.approx(expected, abs=1e-7)


def test_a_scheduler_of_unknown_rates_is_refused() -> None:
    class Own:
        """Sets a rate from what it alone knows."""

    with pytest.raises(UsageError, match=r"scheduler=.*Own\): .*on_reset"):
        Job(lambda _: Own())
    with pytest.raises(UsageError, match="Own"):
        Job(lambda o: SimpleNamespace(_schedulers=[StepLR(o, 3), Own()]))


def test_t17_a_step_that_fails_leaves_no_rate_behind() -> None:
    job = Job(warmup=4)
    job.scale(OLD, NEW)
    saved = copy.deepcopy(job.optimizer.state_dict())
    with pytest.raises(ZeroDivisionError):
        job.optimizer.step(lambda: 1 / 0)
    job.optimizer.load_state_dict(saved)
    for group in job.optimizer.param_groups:
        group["warmup_left"], group["lr"] = 0, 0.4
    assert job.steps(2) == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize("warmup", [0, 4])
def test_a_group_that_is_added_later_takes_its_own_rate(warmup: int) -> None:
    job = Job(warmup=warmup)
    job.scale(OLD, NEW)
    late = torch.nn.Parameter(torch.ones(1))
    job.optimizer.add_param_group({"params": [late], "lr": 0.25})
    late.grad = torch.ones(1)
    job.steps(1)
    assert late.item() == pytest.approx(0.75)
    job.scale(NEW, OLD)
    assert job.optimizer.param_groups[2]["lr"] == pytest.approx(0.125)


def test_rates_of_a_file_without_a_warm_up_are_taken_as_they_are() -> None:
    job = Job(warmup=4)
    plain = torch.optim.SGD([{"params": g["params"]} for g in job.optimizer.param_groups], lr=0.3)
    job.optimizer.load_state_dict(plain.state_dict())
    assert job.steps(2) == pytest.approx([0.3, 0.3])
    job.scale(OLD, NEW)
    assert job.steps(2) == pytest.approx([0.3, 0.375])


def test_t17_a_state_keeps_it_and_calls_it() -> None:
    job = Job(warmup=4)
    state = ee.ElasticState(optimizer=job.optimizer)
    state.on_reset(job.scale)
    state.commit()
    job.scale(OLD, NEW)
    state.restore()
    assert job.steps(1) == pytest.approx([0.1])


@pytest.mark.parametrize("wrong", [{"rule": "cubic"}, {"warmup": -1}])
def test_t17_wrong_arguments_are_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="linear"):
        Job(**wrong)
