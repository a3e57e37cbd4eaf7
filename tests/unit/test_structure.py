"""A value of which a process that starts anew could not load a snapshot is refused at a commit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.swa_utils import AveragedModel

from elastic_etcd.errors import UsageError
from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.forked import Child, group
from tests.support.states import commits


def made() -> ElasticState:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.register_buffer("cache", torch.zeros(2, 3))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return ElasticState(
        model=model, optimizer=optimizer, scheduler=scheduler, swa=None, best=None, step=0
    )


def synced() -> ElasticState:
    state = made()
    state.sync()
    return state


CHANGES: list[tuple[Callable[[ElasticState], Any], str]] = [
    (
        lambda s: setattr(s, "swa", AveragedModel(s.model)),
        "swa was a plain value at the first sync and is a module now: .*Make it before",
    ),
    (
        lambda s: setattr(s.model, "cache", torch.zeros(5, 3)),
        r"model.cache has the shape \[5, 3\], and had \[2, 3\] at .*persistent=False",
    ),
    (
        lambda s: s.model[0].to(torch.bfloat16),
        "model.0.weight is of torch.bfloat16, and was of torch.float32 at .*before that",
    ),
    (
        lambda s: setattr(s.model, "cache", s.model.cache.double()),
        "model.cache is of torch.float64, and was of .*persistent=False",
    ),
    (
        lambda s: s.model[1].register_buffer("mask", torch.ones(3)),
        "model.1.mask was not there at the first sync: .*persistent=False",
    ),
    (
        lambda s: s.model.__delitem__(1),
        "model.1.weight was there at the first sync and is not any more: .*Keep it",
    ),
    (
        lambda s: setattr(s, "optimizer", torch.optim.SGD(s.model.parameters(), lr=0.1)),
        r"optimizer was a torch\.optim\.adamw\.AdamW at .*is a torch\.optim\.s",
    ),
    (
        lambda s: setattr(s, "scheduler", torch.optim.lr_scheduler.ConstantLR(s.optimizer)),
        r"scheduler was a torch\..*StepLR at the first sync and is a torch",
    ),
    (
        lambda s: s.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}),
        "optimizer has param groups of 2, 2 parameters, and had those of 2 at .*names",
    ),
    (
        lambda s: setattr(s, "best", torch.empty(4, dtype=torch.int4)),
        r"best is of torch\.int4, which torch can't copy: keep the torch\.uint8",
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_t5_a_value_that_a_newcomer_could_not_build_is_refused(
    change: Callable[[ElasticState], None], words: str
) -> None:
    state = synced()
    state.step = 1
    state.commit()
    change(state)
    state.step = 2
    with pytest.raises(UsageError, match=words):
        state.commit()
    assert commits(state) == 1


def test_t5_what_a_newcomer_loads_is_committed() -> None:
    """Values that are replaced, modules that are compiled, and moments that come with a step."""
    state = synced()
    state.best = {"loss": 0.5}
    state.model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    state.model.register_buffer("scratch", torch.ones(9), persistent=False)
    state.model = torch.compile(state.model, backend="eager")
    state.commit()
    state.best = torch.ones(3)
    state.model.scratch = torch.ones(10)
    state.commit()


def wrapped(folder: Path) -> list[str]:
    refused = []
    with group(0, 1, folder):
        for wrap in (nn.parallel.DistributedDataParallel, FullyShardedDataParallel):
            state = synced()
            if wrap is FullyShardedDataParallel:
                state.model[1] = wrap(state.model[1], device_id=torch.device("cpu"))
            else:
                state.model = wrap(state.model)
            with pytest.raises(UsageError) as error:
                state.commit()
            refused.append(str(error.value))
    return refused


def test_t5_wrappers_of_a_world_are_refused(tmp_path: Path) -> None:
    of_ddp, of_fsdp = Child(wrapped, tmp_path).result()
    assert of_ddp.startswith("model is a DistributedDataParallel, which belongs to one world: keep")
    assert of_fsdp.startswith("model has a FullyShardedDataParallel: each rank holds another part")


def trained(state: ElasticState) -> Any:
    state.model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    return state


def test_t5_groups_are_made_anew_by_their_parameters_names(tmp_path: Path) -> None:
    """As where a script unfreezes a layer in its third epoch, and a newcomer has not been there."""
    state = trained(synced())
    state.optimizer.add_param_group({"params": state.model[1].parameters(), "lr": 0.01})
    trained(state)
    state.commit()
    state.save(tmp_path / "state")
    newcomer = made()
    newcomer.load(tmp_path / "state")
    theirs, ours = newcomer.optimizer.param_groups, state.optimizer.param_groups
    assert [group["lr"] for group in theirs] == [group["lr"] for group in ours] == [0.1, 0.01]
    assert [len(group["params"]) for group in theirs] == [2, 2]
    assert theirs[1]["params"][0] is newcomer.model[1].weight
    moments = [state.optimizer.state[state.model[n].weight]["exp_avg"] for n in (0, 1)]
    for n, moment in enumerate(moments):
        found = newcomer.optimizer.state[newcomer.model[n].weight]["exp_avg"]
        assert torch.equal(found, moment)
    trained(newcomer)
    newcomer.scheduler.step()


def test_t5_a_restore_takes_out_a_group_that_is_in_no_commit() -> None:
    state = trained(synced())
    state.commit()
    state.optimizer.add_param_group({"params": state.model[1].parameters(), "lr": 0.01})
    trained(state)
    state.restore()
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.1]
    assert [*state.optimizer.state] == [*state.model[0].parameters()]
    trained(state)
