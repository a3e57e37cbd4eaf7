"""Drawn sequences of worlds, in which a sharded state goes on from its last commit, bit by bit."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from elastic_etcd.train.state.elastic_state import ElasticState
from tests.support.forked import group


class Tied(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A model of drawn sizes: uneven, with tied weights and a frozen part, or without."""

    def __init__(self, draws: random.Random) -> None:
        super().__init__()
        width, hidden = draws.randint(1, 9), draws.randint(1, 33)
        self.first = nn.Linear(width, hidden)
        self.last = nn.Linear(hidden, width)
        if draws.random() < 0.3:
            self.first.bias.requires_grad_(False)
        self.again = nn.Linear(width, hidden)
        self.register_buffer("mean", torch.zeros(width))
        self.width = width

    def forward(self, x: torch.Tensor) -> Any:
        x = x - self.mean
        return self.last(torch.relu(self.first(x) - self.again(x)))


def builder(seed: int) -> Callable[[Any], dict[str, Any]]:
    def build(world: Any) -> dict[str, Any]:
        draws = random.Random(seed)
        torch.manual_seed(seed)
        model = Tied(draws).to(world.device)
        half, replicated, layers = draws.random() < 0.3, draws.random() < 0.5, draws.randint(0, 2)
        adam = draws.random() < 0.6
        if not layers and draws.random() < 0.5:
            model.again.weight = model.first.weight
        if half:
            model.bfloat16()
        names = ("replicate", "shard")
        several = replicated and world.world_size % 2 == 0
        mesh = world.mesh(2, -1, names=names) if several else world.mesh()
        for layer in (model.first, model.last)[:layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        parameters = [each for each in model.parameters() if each.requires_grad]
        if adam:
            optimizer: Any = torch.optim.AdamW(parameters, lr=0.01)
        else:
            optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        return {"model": model, "optimizer": optimizer}

    return build


def whole(state: ElasticState) -> dict[str, torch.Tensor]:
    """All tensors of a state, gathered."""
    found = {f"model.{name}": each for name, each in state.model.state_dict().items()}
    for number, moments in state.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": moment for name, moment in moments.items()}
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone()
        for name, each in found.items()
    }


def train(state: ElasticState, rank: int) -> None:
    """A step, whose batch is another one on each rank."""
    parameter = next(state.model.parameters())
    seed = torch.Generator(parameter.device).manual_seed(100 * state.epoch + rank)
    x = torch.randn(
        4, state.model.width, generator=seed, dtype=parameter.dtype, device=parameter.device
    )
    state.model(x).float().square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.epoch += 1


class Change(NamedTuple):
    """A world, and how it ends: it is left by those who are not in the next one, or loses them."""

    members: list[int]
    planned: bool


def changes(seed: int, processes: int) -> list[Change]:
    """Worlds of a scenario, of which none loses more than one process at once."""
    draws = random.Random(seed)
    everybody = list(range(processes))
    members = draws.sample(everybody, draws.randint(1, processes))
    found = []
    for _ in range(draws.randint(2, 5)):
        planned = draws.random() < 0.5
        found.append(Change(members, planned))
        stay = members
        if planned:
            stay = draws.sample(members, draws.randint(1, len(members)))
        elif len(members) > 1 and draws.random() < 0.7:
            stay = draws.sample(members, len(members) - 1)
        others = [each for each in everybody if each not in members]
        joined = draws.sample(others, draws.randint(0, len(others)))
        members = [*stay, *joined]
        if draws.random() < 0.3:
            draws.shuffle(members)
    return [*found, Change(members, planned=False)]


def live(
    process: int, folder: Path, seeds: range, processes: int, backend: str = "gloo"
) -> list[str]:
    """One process's way through all scenarios; what it found wrong."""
    wrong = []
    for seed in seeds:
        state: ElasticState | None = None
        scenario = changes(seed, processes)
        following = [each.members for each in scenario[1:]] + [scenario[-1].members]
        for number, change in enumerate(scenario):
            if process not in change.members:
                continue
            rank, stays = change.members.index(process), process in following[number]
            os.environ |= {"GROUP_RANK": str(rank), "ELASTIC_ETCD_GENERATION": str(number + 1)}
            there = folder / f"{seed}.{number}"
            there.mkdir(exist_ok=True)
            torch.distributed.distributed_c10d._world.group_count = 0  # as ee.run does
            state = state or ElasticState(build=builder(seed), epoch=0)
            with group(rank, len(change.members), there, backend):
                if not number:
                    state.sync()
                file = folder / f"{seed}.pt"  # what was committed last
                if number and not is_of(state, file):
                    wrong.append(f"{seed}: process {process} in world {number}")
                train_in_world(state, rank, file, planned=change.planned, stays=stays)
            if not change.planned:
                state._rewind()
            state = state if stays else None  # its memory goes with it
    return wrong


def is_of(state: ElasticState, file: Path) -> bool:
    """Whether the state, once it is synchronised, is what is in the file."""
    state.sync()
    kept = torch.load(file)
    return is_same(whole(state), kept["tensors"]) and state.epoch == kept["epoch"]


def train_in_world(
    state: ElasticState, rank: int, file: Path, *, planned: bool, stays: bool
) -> None:
    """Some steps and commits, of which the last one goes into the file, and a step that is lost."""
    for _ in range(2):
        train(state, rank)
        if not planned:
            state.commit()
    if planned:
        state._leave(leaves=not stays)
    tensors = whole(state)
    if rank == 0:
        torch.save({"tensors": tensors, "epoch": state.epoch}, file)
    if not planned:
        train(state, rank)
        if state.epoch % 3:  # a commit is broken off before it counts
            shards: dict[str, Any] = {}
            state._save_values(shards)
            last = state._snapshots.version()
            assert last
            state._write_shards(replace(last, counter=last.counter + 1), shards)
        if state.epoch % 2:
            state.restore()
            assert is_same(whole(state), tensors)
    torch.distributed.barrier()
    state._end_world()


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
