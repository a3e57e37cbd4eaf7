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


def averaged(state: ElasticState) -> None:
    state.swa = AveragedModel(state.model)


def grown(state: ElasticState) -> None:
    state.model.cache = torch.zeros(5, 3)


def halved(state: ElasticState) -> None:
    state.model[0].to(torch.bfloat16)


def counted(state: ElasticState) -> None:
    state.model.cache = state.model.cache.double()


def added_buffer(state: ElasticState) -> None:
    state.model[1].register_buffer("mask", torch.ones(3))


def dropped(state: ElasticState) -> None:
    del state.model[1]


def another_optimizer(state: ElasticState) -> None:
    state.optimizer = torch.optim.SGD(state.model.parameters(), lr=0.1)


def another_scheduler(state: ElasticState) -> None:
    state.scheduler = torch.optim.lr_scheduler.ConstantLR(state.optimizer)


def strangers(state: ElasticState) -> None:
    state.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})


def int4(state: ElasticState) -> None:
    state.best = torch.empty(4, dtype=torch.int4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (averaged, "swa was a plain value at the first sync and is a module now: .*Make it before"),
        (grown, r"model.cache has the shape \[5, 3\], and had \[2, 3\] at .*persistent=False"),
        (halved, "model.0.weight is of torch.bfloat16, and was of torch.float32 at .*before that"),
        (counted, "model.cache is of torch.float64, and was of .*persistent=False"),
        (added_buffer, "model.1.mask was not there at the first sync: .*persistent=False"),
        (dropped, "model.1.weight was there at the first sync and is not any more: .*Keep it"),
        (
            another_optimizer,
            r"optimizer was a torch\.optim\.adamw\.AdamW at .*is a torch\.optim\.s",
        ),
        (another_scheduler, r"scheduler was a torch\..*StepLR at the first sync and is a torch"),
        (strangers, "optimizer has param groups of 2, 2 parameters, and had those of 2 at .*names"),
        (int4, r"best is of torch\.int4, which torch can't copy: keep the torch\.uint8"),
    ],
)
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
    last = state._snapshots.version()
    assert last
    assert last.counter == 1


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
