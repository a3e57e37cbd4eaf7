"""Train a small network on scikit-learn's digits with DDP: a plain script that knows no launcher.

    python examples/digits_ddp.py
    torchrun --nproc-per-node 2 examples/digits_ddp.py --checkpoint-dir /tmp/digits
    python -m elastic_etcd.launch --nproc-per-node 2 examples/digits_ddp.py --checkpoint-dir ...

Rank 0 saves model, optimizer and epoch after each epoch, and every start resumes from there, so
all nodes must see the same checkpoint directory.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAIN_SAMPLES = 1437  # of 1797; the others are the test set


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint-dir", type=Path, help="no checkpoints without it")
    return parser.parse_args()


def join_world() -> torch.device:
    """The process group that the launcher's variables describe; without any, a world of one."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8x8 pixels, shuffled once and split into train and test."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels, dtype=torch.long)[order]
    train = TensorDataset(x[:TRAIN_SAMPLES], y[:TRAIN_SAMPLES])
    return train, TensorDataset(x[TRAIN_SAMPLES:], y[TRAIN_SAMPLES:])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write aside and rename: a reader, or a crash, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, aside)
    aside.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what `save` wrote; the number of epochs already done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    x, y = test.tensors
    with torch.no_grad():
        return float((model(x.to(device)).argmax(dim=1).cpu() == y).float().mean())


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    train_set, test_set = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    checkpoint = args.checkpoint_dir / "digits.pt" if args.checkpoint_dir else None
    first = load(checkpoint, model, optimizer) if checkpoint and checkpoint.exists() else 0

    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            world = dist.get_world_size()
            print(f"epoch {epoch + 1}/{args.epochs}  world {world}  loss {loss:.4f}", flush=True)
            if checkpoint:
                save(checkpoint, model, optimizer, epoch + 1)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy(model, test_set, device):.3f} on {len(test_set)} test images")


def main() -> None:
    args = parse_args()
    device = join_world()
    train(args, device)
    gc.collect()  # DDP is in reference cycles; a gloo group that they keep aborts at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
