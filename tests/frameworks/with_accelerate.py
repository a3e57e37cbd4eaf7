"""docs/memory.md's recipe for accelerate, in a script that tells the test what it does."""

import argparse
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import elastic_etcd as ee
from tests.support.trainers.saver import say


class Progress:
    """What accelerate does not count."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.step = saved["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    each_node = ProjectConfiguration(save_on_each_node=True)
    accelerator = Accelerator(cpu=True, project_config=each_node)
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if path := ee.latest_checkpoint():
        accelerator.load_state(path)
    say("begins", progress.step, os.getpid())
    stop = torch.zeros(1)
    while not stop:
        optimizer.zero_grad()
        accelerator.backward(-model(torch.ones(1, 4)).sum())
        optimizer.step()
        progress.step += 1
        assert (accelerator.unwrap_model(model).weight == progress.step).all()
        with ee.memory_checkpoint(progress.step, every=5) as folder:
            if folder:
                accelerator.save_state(folder)
        if folder:
            say("saved", progress.step)
        time.sleep(0.02)
        stop = accelerator.reduce(torch.tensor(float((args.dir / "stop").exists())), "sum")
    accelerator.end_training()


if __name__ == "__main__":
    main()
