"""docs/memory.md's recipe for FSDP2, as torchtitan has it: a plain script that saves by DCP.

Each step adds 1 to every weight, so that the weights say how many steps they have been through.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import elastic_etcd as ee
from tests.support.trainers.saver import say


class App(Stateful):  # type: ignore[misc]  # torch is not followed
    """All that a checkpoint has, under names that do not depend on ranks."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        self.step = saved["step"]


def own_device() -> torch.device:
    """The GPU of this worker, now its current one, if there are some."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--disk", type=Path)
    args = parser.parse_args()
    device = own_device()
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
    model.to(device)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    app = App(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    if path := ee.latest_checkpoint(args.disk):
        dcp.load({"app": app}, checkpoint_id=path)
    say("begins", app.step, os.getpid())
    stop = torch.zeros(1)
    while not stop:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        app.optimizer.step()
        for moment in app.optimizer.state.values():
            moment["momentum_buffer"].zero_()
        app.step += 1
        for parameter in model.parameters():
            if not bool((parameter.full_tensor() == app.step).all()):
                sys.exit(f"step {app.step}, but the weights are {parameter.full_tensor()}")
        with ee.memory_checkpoint(
            app.step, every=5, disk=args.disk, disk_every=20, sharded=True
        ) as folder:
            if folder:  # on every rank
                dcp.save({"app": app}, checkpoint_id=folder)
        if folder:
            say("saved", app.step)
        time.sleep(0.02)
        stop.fill_((args.dir / "stop").exists())
        dist.all_reduce(stop, dist.ReduceOp.MAX)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
