"""Train a small transformer, sharded by FSDP2; nodes may die, leave and join at any step.

    python -m elastic_etcd.launch --nnodes 2:4 examples/fsdp2_elastic.py

Each rank has a part of the weights and moments. A commit keeps every part in the memory of two
nodes; in another world each rank gets its new part from those who have it. With --checkpoints DIR
each epoch is written to a disk, too, for the day that all nodes are lost. The text is made here:
sums such as "12+7=19;", of which the model learns the answers.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elastic_etcd as ee

LETTERS = "0123456789+=;"
LENGTH = 10


def sums(count: int) -> TensorDataset:
    """As many sums, each a row of letters' numbers."""
    pairs = torch.randint(0, 100, (count, 2), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [f"{a}+{b}={a + b};".ljust(LENGTH, ";") for a, b in pairs]
    return TensorDataset(torch.tensor([[LETTERS.index(letter) for letter in row] for row in rows]))


class Transformer(nn.Module):
    """A few blocks of attention over letters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, rows: Tensor) -> Tensor:
        """Logits of each letter's successor."""
        length = rows.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=rows.device)
        x = self.letters(rows) + self.places(torch.arange(length, device=rows.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def build(world: ee.BuildWorld) -> dict[str, object]:
    """The values that are sharded, for a world: called anew for each."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(args.width, args.depth)
    mesh = world.mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=world.device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=args.lr)}


def first(state: ee.ElasticState) -> None:
    """Give the weights their first values: called once in the job's life."""
    for module in state.model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()  # noqa: SLF001 - torch has no other name for it
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


@ee.run
def train(state: ee.ElasticState, data: TensorDataset) -> None:
    """Called once for each world; goes on where `state` stands."""
    device = next(state.model.parameters()).device
    loader = DataLoader(data, batch_size=args.batch, sampler=state.sampler)
    while state.epoch < args.epochs:
        state.sampler.set_epoch(state.epoch)
        total, steps = torch.zeros((), device=device), 0
        for (rows,) in state.steps(loader, commit_every=args.commit_every):
            rows = rows.to(device)  # noqa: PLW2901
            logits = state.model(rows[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            state.optimizer.zero_grad()
            loss.backward()
            state.optimizer.step()
            total, steps = total + loss.detach(), steps + 1
        state.epoch += 1
        state.commit()
        if args.checkpoints:  # in the background: a slow disk costs no step
            state.save(args.checkpoints, wait=False, keep=2)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            world = dist.get_world_size()
            print(
                f"epoch {state.epoch}  world {world}  loss {total / world / steps:.4f}", flush=True
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, on each rank")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--commit-every", type=int, default=5, help="steps")
    parser.add_argument("--checkpoints", help="a directory that all nodes share")
    args = parser.parse_args()
    samples = sums(args.samples)
    state = ee.ElasticState(build=build, first=first, sampler=ee.ElasticSampler(samples), epoch=0)
    if args.checkpoints:  # the newest counts when no node has a commit in memory any more
        state.load(args.checkpoints)
    train(state, samples)
