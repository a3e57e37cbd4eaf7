"""DDP on scikit-learn's digits, in arithmetic whose result is the same in every world.

Each sample's gradient is computed alone and rounded to a multiple of 2^-32, so that sums of them
are exact in float64, whoever takes which sample and in whatever order DDP adds up. `Learner` is
all of it but the worlds; a test uses it for the reference. With --plain it is DDP as everybody
uses it, in float32.

Beside the `start`s, `step`s and the `end` of ddp.py there is a file that ends in .uses: a line
`begin` for each world, with the step that it goes on from and the generation in which that was
trained; and `use` for the samples that this rank is about to contribute to a step, before it does.
"""

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastic_etcd as ee

LENGTH = 308  # samples: an epoch is 23 global batches and 9 samples
GLOBAL_BATCH = 13
SEED = 5
ULP = 2.0**-32  # of a sample's gradient


class Learner:
    """The model, what trains it, and the data: the same in each process that makes it."""

    def __init__(self, *, plain: bool = False) -> None:
        torch.set_num_threads(1)
        kind = torch.float32 if plain else torch.float64
        pixels, labels = self.data()
        self.x = torch.tensor(pixels[:LENGTH], dtype=kind) / 16
        self.y = torch.tensor(labels[:LENGTH])
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10)).to(kind)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.999)
        if not plain:
            for parameter in self.model.parameters():
                parameter.register_hook(lambda grad: torch.round(grad / ULP) * ULP)

    def data(self) -> tuple[Any, Any]:
        """Rows of 64 pixels, each from 0 to 16, and which digit each is."""
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)  # type: ignore[no-any-return]

    def contribute(self, model: nn.Module, index: int) -> None:
        """Add one sample's gradient to what there is, through `model`."""
        loss = cross_entropy(model(self.x[index : index + 1]), self.y[index : index + 1])
        (loss / 16).backward()  # a power of two changes no bit but exponents

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()  # type: ignore[no-any-return]


class Log:
    """This process's files; a line is there when `write` or `use` returns."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{os.environ['ELASTIC_ETCD_NODE']}.{os.getpid()}.jsonl"
        self._events = path.open("a", buffering=1)
        self._uses = path.with_suffix(".uses").open("a", buffering=1)

    def write(self, event: str, **more: Any) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
        fields = {name.lower(): int(os.environ[name]) for name in names} | {
            "event": event,
            "time": time.time(),
            "generation": generation(),
            "node": os.environ["ELASTIC_ETCD_NODE"],
            "pid": os.getpid(),
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        }
        self._events.write(json.dumps(fields | more) + "\n")

    def use(self, what: str, step: int, **more: Any) -> None:
        line = {"what": what, "generation": generation(), "step": step} | more
        self._uses.write(json.dumps(line | {"rank": int(os.environ["RANK"])}) + "\n")


def generation() -> int:
    return int(os.environ["ELASTIC_ETCD_GENERATION"])


def summed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication, but a sum: dividing by a world of three is not exact."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--step-time", type=float, default=0.02, help="what a step computes for")
    parser.add_argument("--commit-every", type=int, default=3)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--save", type=Path, help="after each epoch")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:STEP", help="once")
    return parser.parse_args()


def fail(args: argparse.Namespace, step: int) -> None:
    """In the middle of a step: as declared on the command line, or asked for by a file."""
    here, node = f"{os.environ['RANK']}:{step}", os.environ["ELASTIC_ETCD_NODE"]
    done = args.dir / f"killed.{here}"
    if here in args.kill and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        (args.dir / f"raise.{node}").unlink()
        raise ValueError(f"a mistake of the user's on {node}")


def gradients(learner: Learner, ddp: DistributedDataParallel, indices: list[int]) -> None:
    """This rank's part of the step: one sample after another, the sum of all with the last."""
    for index in indices:
        alone = contextlib.nullcontext() if index == indices[-1] else ddp.no_sync()
        with alone:
            learner.contribute(ddp, index)


def train(state: ee.ElasticState, learner: Learner, args: argparse.Namespace, log: Log) -> None:
    """One world's part of the training."""
    log.write("start", step=state.step)
    log.use("begin", state.step, made=state.made)
    ddp = DistributedDataParallel(learner.model)
    if not args.plain:
        ddp.register_comm_hook(None, summed)
    plan = ee.accumulation_steps(GLOBAL_BATCH, 1)
    state.sampler.reshard(batch_sizes=plan.batch_sizes)
    loader = DataLoader(range(LENGTH), plan.batch_size, sampler=state.sampler)
    while True:
        for batch in state.steps(loader, commit_every=args.commit_every):
            step, indices = state.step + 1, batch.tolist()
            log.use("use", step, epoch=state.sampler.epoch, indices=indices)
            fail(args, step)
            gradients(learner, ddp, indices)
            learner.step()
            time.sleep(args.step_time)
            state.step, state.made = step, generation()
            log.write("step", step=step)
            asked = torch.tensor([int((args.dir / "stop").exists() or step >= args.steps)])
            dist.all_reduce(asked)
            if asked:
                return
        state.sampler.set_epoch(state.sampler.epoch + 1)
        if args.save:
            state.commit()
            state.save(args.save)


def main() -> None:
    args = arguments()
    log, learner = Log(args.dir), Learner(plain=args.plain)
    state = ee.ElasticState(
        model=learner.model,
        optimizer=learner.optimizer,
        scheduler=learner.scheduler,
        sampler=ee.ElasticSampler(LENGTH, seed=SEED, tail="uneven"),
        step=0,
        made=0,  # the generation of that step
    )
    if args.save and args.save.exists():
        state.load(args.save)
    ee.run(train)(state, learner, args, log)
    log.use("end", state.step, made=state.made)
    weights = args.dir / f"{os.environ['ELASTIC_ETCD_NODE']}.{os.environ['LOCAL_RANK']}.weights"
    torch.save(learner.weights(), weights)
    log.write("end", step=state.step)


if __name__ == "__main__":
    main()
