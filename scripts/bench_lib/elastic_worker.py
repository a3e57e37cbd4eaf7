"""The benchmark's worker once more, for recovery in process: what worker.py does, with @ee.run."""

import itertools
import sys
import time
from pathlib import Path

from worker import BEGUN, Steps  # first: it stamps before it imports torch

# isort: split
import torch
from torch.nn.parallel import DistributedDataParallel

import elastic_etcd as ee

WORLDS = itertools.count()  # of this process; the state is the job's


@ee.run
def train(state: ee.ElasticState, directory: Path) -> None:
    """Called once for each world."""
    world = next(WORLDS)
    steps = Steps(directory, world)
    if world == 0:
        steps.passed("script", BEGUN)
        steps.passed("imports", READY)
    steps.passed("process group")
    model = DistributedDataParallel(state.model)
    steps.passed("DDP")
    stop = False
    while not stop:
        state.optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        state.optimizer.step()
        state.commit(every=5)
        stop = steps.stop()
        steps.step()
        state.check()
    steps.close()


READY = time.monotonic()  # ee.run and ee.ElasticState are loaded when they are first named


def main() -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(ee.ElasticState(model=model, optimizer=optimizer), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
