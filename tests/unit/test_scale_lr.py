"""ee.scale_lr: which learning rate each step takes, over any worlds and schedulers."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR, StepLR

import elastic_etcd as ee
from elastic_etcd.errors import UsageError
from elastic_etcd.train.collectives import World

OLD, NEW, NEXT = World(1, 0, 4), World(2, 0, 8), World(3, -1, 2)


class Job:
    """An optimizer of two groups, and the rates with which its steps are taken."""

    def __init__(self, scheduled: Any = None, **arguments: Any) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1))
        other = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.01}
        self.optimizer = torch.optim.SGD([{"params": [self.weight]}, other], lr=0.1)
        self.scheduler = scheduled(self.optimizer) if scheduled else None
        self.scale = ee.scale_lr(self.optimizer, scheduler=self.scheduler, **arguments)

    def steps(self, count: int) -> list[float]:
        """What they have taken from the weight, whose gradient is 1."""
        taken = []
        for _ in range(count):
            before = self.weight.item()
            self.weight.grad = torch.ones(1)
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


@pytest.mark.parametrize(
    "scheduled",
    [
        lambda o: LambdaLR(o, lambda step: 0.9**step),
        lambda o: StepLR(o, 3),
        lambda o: CosineAnnealingLR(o, 20),
        lambda o: SequentialLR(
            o, [LinearLR(o, total_iters=5), CosineAnnealingLR(o, 20)], milestones=[5]
        ),
    ],
    ids=["lambda", "step", "cosine", "sequential"],
)
def test_t17_a_scheduler_goes_on_from_the_scaled_rate(scheduled: Any) -> None:
    plain, job = Job(scheduled), Job(scheduled)
    assert plain.steps(2) == job.steps(2)
    job.scale(OLD, NEW)
    expected = [2 * taken for taken in plain.steps(8)]
    assert job.steps(8) == pytest.approx(expected, rel=1e-3)


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
