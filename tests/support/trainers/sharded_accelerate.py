"""A plain script of accelerate's FSDP2, whose state is kept in memory as docs/memory.md has it."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import elastic_etcd as ee
from tests.support.trainers.saver import say


class Progress:
    """The step, as accelerate wants it for its checkpoints."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.step = saved["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if path := ee.latest_checkpoint():
        accelerator.load_state(path)
    say("begins", progress.step, os.getpid())
    stop = torch.zeros(1, device=accelerator.device)
    while not stop:
        accelerator.backward(model(torch.randn(4, 5, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        with ee.memory_checkpoint(progress.step, every=5, sharded=True) as folder:
            if folder:  # on every rank
                accelerator.save_state(folder)
        if folder:
            say("saved", progress.step)
        time.sleep(0.02)
        stop.fill_((args.dir / "stop").exists())
        dist.all_reduce(stop, dist.ReduceOp.MAX)
    accelerator.end_training()


if __name__ == "__main__":
    main()
