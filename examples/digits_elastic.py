"""Train a small network on scikit-learn's digits; nodes may die, leave and join at any step.

    python examples/digits_elastic.py
    torchrun --nproc-per-node 2 examples/digits_elastic.py
    python -m elastic_etcd.launch --nnodes 1:4 --preload sklearn.datasets examples/digits_elastic.py

The global batch stays 128 samples whatever the world, each sample is used once per epoch, and no
checkpoint directory is shared: survivors go on from memory, and newcomers get the state from them.
With --save FILE a run that has lost all its nodes begins where its file ends.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elastic_etcd as ee

TRAIN_SAMPLES = 1437  # of 1797; the others are the test set


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=128, help="of all workers together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save", type=Path, help="write the state here after each epoch")
    return parser.parse_args()


def local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8x8 pixels, shuffled once and split into train and test."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels, dtype=torch.long)[order]
    train = TensorDataset(x[:TRAIN_SAMPLES], y[:TRAIN_SAMPLES])
    return train, TensorDataset(x[TRAIN_SAMPLES:], y[TRAIN_SAMPLES:])


@ee.run
def train(state: ee.ElasticState, args: argparse.Namespace, data: TensorDataset) -> None:
    """Called once for each world; goes on where `state` stands."""
    device = next(state.model.parameters()).device
    model = DistributedDataParallel(state.model)
    plan = ee.accumulation_steps(args.global_batch, args.global_batch)
    state.sampler.reshard(batch_sizes=plan.batch_sizes)
    loader = DataLoader(data, batch_size=plan.batch_size, sampler=state.sampler)
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        loss = torch.zeros(())
        # A failure costs up to 5 steps; a join or a leave waits for the end of a step.
        for x, y in state.steps(loader, commit_every=5):
            state.optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device)), y.to(device))
            (loss * plan.weight(len(x))).backward()
            state.optimizer.step()
        report(state, args, loss)


def report(state: ee.ElasticState, args: argparse.Namespace, loss: Tensor) -> None:
    """Close the epoch."""
    state.epoch += 1
    state.commit()
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        print(f"epoch {state.epoch}/{args.epochs}  world {world}  loss {loss:.4f}", flush=True)
    if args.save:
        state.save(args.save)


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    x, y = (tensor.to(next(model.parameters()).device) for tensor in test.tensors)
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    device = local_device()
    train_set, test_set = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = ee.ElasticSampler(train_set, seed=0)
    state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    if args.save and args.save.exists():
        state.load(args.save)
    train(state, args, train_set)
    print(f"accuracy {accuracy(model, test_set):.3f} on {len(test_set)} test images", flush=True)


if __name__ == "__main__":
    main()
