"""A small model in sums that are the same in every world, with ee.run or without.

Lines are as those of tests/support/trainers/digits.py, in one file for each node. With --plain the
worker is restarted in each new world, as any script; its state is what its node's agent kept.
"""

import argparse
import faulthandler
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastic_etcd as ee
from elastic_etcd.errors import EtcdUnreachable, StaleGeneration
from tests.support.trainers.digits import (
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    Learner,
    Log,
    generation,
    gradients,
    summed,
)

SAVE_EVERY = 40  # steps


class Small(Learner):
    """Data by chance, since scikit-learn takes seconds to import in each agent's pool."""

    def data(self) -> tuple[Any, Any]:
        chance = torch.Generator().manual_seed(SEED)
        pixels = torch.randint(17, (LENGTH, 64), generator=chance)
        return pixels.numpy(), torch.randint(10, (LENGTH,), generator=chance).numpy()


class NodeLog(Log):
    """One file for all processes of a node, so that few files have to be watched."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{os.environ['ELASTIC_ETCD_NODE']}.jsonl"
        self._events = path.open("a", buffering=1)
        self._uses = path.with_suffix(".uses").open("a", buffering=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--step-time", type=float, default=0.05, help="what a step computes for")
    parser.add_argument("--commit-every", type=int, default=3)
    return parser.parse_args()


def save(state: ee.ElasticState, log: Log, path: Path) -> None:
    """Write the file, if this generation is still the job's; say so when it was written."""
    asked = time.time()
    try:
        state.save(path)
    except (StaleGeneration, EtcdUnreachable) as error:
        log.use("refused", state.step, why=str(error))
    else:
        if not dist.get_rank():
            log.use("saved", state.step, asked=asked)


def train(state: ee.ElasticState, learner: Learner, args: argparse.Namespace, log: Log) -> None:
    """One world's part of the training."""
    log.write("start", step=state.step)
    log.use("begin", state.step, made=state.made)
    ddp = DistributedDataParallel(learner.model)
    ddp.register_comm_hook(None, summed)
    plan = ee.accumulation_steps(GLOBAL_BATCH, 1)
    state.sampler.reshard(batch_sizes=plan.batch_sizes)
    loader = DataLoader(range(LENGTH), plan.batch_size, sampler=state.sampler)
    while True:
        for batch in state.steps(loader, commit_every=args.commit_every):
            step, indices = state.step + 1, batch.tolist()
            use = {"epoch": state.sampler.epoch, "indices": indices, "time": time.time()}
            log.use("use", step, **use)
            gradients(learner, ddp, indices)
            learner.step()
            time.sleep(args.step_time)  # what a larger model would compute for
            state.step, state.made = step, generation()
            log.write("step", step=step)
            print("step", step, flush=True)  # the agent writes it under --log-dir
            if step % SAVE_EVERY == 0:
                state.commit()
                save(state, log, args.dir / "saved")
            asked = torch.tensor([int((args.dir / "stop").exists())])
            dist.all_reduce(asked)
            if asked:
                return
        state.sampler.set_epoch(state.sampler.epoch + 1)


def restarted(state: ee.ElasticState, learner: Learner, args: argparse.Namespace, log: Log) -> None:
    """Without ee.run: one world, then the process ends."""
    dist.init_process_group("gloo")
    state.sync()
    train(state, learner, args, log)
    gc.collect()  # a gloo group that DDP's reference cycles keep aborts the process at its exit
    dist.destroy_process_group()


def main() -> None:
    faulthandler.register(signal.SIGUSR1)  # tells where it hangs
    args = arguments()
    log, learner = NodeLog(args.dir), Small()
    state = ee.ElasticState(
        model=learner.model,
        optimizer=learner.optimizer,
        scheduler=learner.scheduler,
        sampler=ee.ElasticSampler(LENGTH, seed=SEED, tail="uneven"),
        step=0,
        made=0,  # the generation of that step
    )
    if (args.dir / "saved").exists():
        state.load(args.dir / "saved")
    live = restarted if args.plain else ee.run(train)
    live(state, learner, args, log)
    log.use("end", state.step, made=state.made)
    name = f"{os.environ['ELASTIC_ETCD_NODE']}.{os.environ['LOCAL_RANK']}.weights"
    torch.save(learner.weights(), args.dir / name)
    log.write("end", step=state.step)


if __name__ == "__main__":
    main()
