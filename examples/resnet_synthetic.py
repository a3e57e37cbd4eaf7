"""Train ResNet-18 on made-up images of ImageNet's shape: what a job on GPUs looks like.

    python -m elastic_etcd.launch --etcd etcd:2379 --job resnet --nnodes 2:8 \
        --nproc-per-node gpu examples/resnet_synthetic.py
    python examples/resnet_synthetic.py --images 64 --size 64 --batch 8      # a look, on a CPU

Mixed precision, channels last, a learning rate that follows the global batch, and images per
second. The images are made of their index, so that no disk is measured.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, Dataset

import elastic_etcd as ee

CLASSES = 1000
LOG_EVERY = 20  # steps


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1_281_167, help="in an epoch")
    parser.add_argument("--size", type=int, default=224, help="of an image, in pixels")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.1, help="for a global batch of 256")
    parser.add_argument("--loader-workers", type=int, default=4)
    return parser.parse_args()


class Images(Dataset[tuple[Tensor, int]]):
    """Noise with a label: what `index` gives is always the same."""

    def __init__(self, length: int, size: int) -> None:
        self._length, self._size = length, size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        chance = torch.Generator().manual_seed(index)
        return torch.randn(3, self._size, self._size, generator=chance), index % CLASSES


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, figure 2)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            project = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES)]
    return nn.Sequential(*layers)


@ee.run
def train(state: ee.ElasticState, ddp: nn.Module, args: argparse.Namespace, images: Images) -> None:
    """Called once for each world; goes on where `state` stands."""
    device = next(ddp.parameters()).device
    cuda = device.type == "cuda"
    for group in state.optimizer.param_groups:
        group["lr"] = args.lr * args.batch * dist.get_world_size() / 256
    loader = DataLoader(
        images,
        batch_size=args.batch,
        sampler=state.sampler,
        num_workers=args.loader_workers,
        pin_memory=cuda,
    )
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        since = time.perf_counter()
        for step, (x, y) in enumerate(state.steps(loader, commit_every=50), 1):
            pixels = x.to(device, memory_format=torch.channels_last, non_blocking=True)
            state.optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16 if cuda else torch.bfloat16):
                loss = cross_entropy(ddp(pixels), y.to(device, non_blocking=True))
            state.scaler.scale(loss).backward()
            state.scaler.step(state.optimizer)
            state.scaler.update()
            if step % LOG_EVERY == 0 and dist.get_rank() == 0:
                rate = (
                    LOG_EVERY * args.batch * dist.get_world_size() / (time.perf_counter() - since)
                )
                print(f"epoch {state.epoch}  loss {loss:.3f}  {rate:.0f} images/s", flush=True)
                since = time.perf_counter()
        state.epoch += 1
        state.commit()


def main() -> None:
    args = parse_args()
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else "cpu"
    model = resnet18().to(device, memory_format=torch.channels_last)
    images = Images(args.images, args.size)
    state = ee.ElasticState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-5),
        scaler=torch.amp.GradScaler(enabled=cuda),
        sampler=ee.ElasticSampler(images, shuffle="stream"),
        epoch=0,
    )

    train(state, ee.ddp(model), args, images)


if __name__ == "__main__":
    main()
