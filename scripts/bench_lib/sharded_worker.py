"""The worker of `scripts/bench sharded`: an FSDP2 script, as it is or under `@ee.run`.

It writes what worker.py writes. The plain one saves by torch.distributed.checkpoint into a
directory beside that, each so many steps, and loads from there when it begins.
"""

import time

BEGUN = time.monotonic()  # before the imports

import argparse  # noqa: E402
import itertools  # noqa: E402
import shutil  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from scripts.bench_lib.worker import COMMIT_EVERY, STEP_SECONDS, Steps  # noqa: E402

IMPORTED = time.monotonic()
SAVE_EVERY = 25  # steps: a save takes longer than a commit
LAYERS = 8


def sharded(megabytes: float, mesh: DeviceMesh) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Layers without values, of so many megabytes with moments; of next to nothing for 0."""
    layers = LAYERS if megabytes else 1
    width = round((megabytes * 1e6 / (3 * 4 * layers)) ** 0.5) if megabytes else 8
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def fill(model: nn.Module) -> None:
    """Give the weights their first values."""
    for parameter in model.parameters():
        parameter.detach().to_local().normal_(std=0.02)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write all ranks' parts; the directory that was there is replaced."""
    values, moments = get_state_dict(model, optimizer)
    aside = folder.with_suffix(".new")
    parts = {"model": values, "optimizer": moments, "step": torch.tensor(step)}
    checkpoint.save(parts, checkpoint_id=aside)
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take the parts that these shards need; the step of the checkpoint."""
    values, moments = get_state_dict(model, optimizer)
    parts = {"model": values, "optimizer": moments, "step": torch.tensor(0)}
    checkpoint.load(parts, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=moments)
    return int(parts["step"])


def step(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, model[0].in_features)).square().mean().backward()
    optimizer.step()


def plain(args: argparse.Namespace) -> None:
    """One world, which the launcher starts anew for each."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = sharded(args.megabytes, mesh)
    saved = args.directory / "saved"
    done = 0
    if saved.exists():
        done = load(saved, model, optimizer)
    else:
        fill(model)
    steps = Steps(args.directory, STEP_SECONDS, done=done)
    steps.passed("script", BEGUN)
    steps.passed("imports", IMPORTED)
    stop = False
    while not stop:
        step(model, optimizer)
        if (steps.done + 1) % SAVE_EVERY == 0:
            save(saved, model, optimizer, steps.done + 1)
        stop = steps.stop(None)
        steps.step()
    dist.destroy_process_group()


def in_process(args: argparse.Namespace) -> None:
    """One world after the other in the same process."""
    import elastic_etcd as ee  # noqa: PLC0415 - no part of what torchrun runs

    worlds = itertools.count()  # of this process; the state is the job's

    def build(world: ee.BuildWorld) -> dict[str, object]:
        model, optimizer = sharded(args.megabytes, world.mesh())
        return {"model": model, "optimizer": optimizer}

    @ee.run(backend="gloo")
    def live(state: ee.ElasticState) -> None:
        steps = Steps(args.directory, STEP_SECONDS, next(worlds), state.step)
        stop = False
        while not stop:
            step(state.model, state.optimizer)
            state.step = steps.done + 1
            state.commit(every=COMMIT_EVERY)
            stop = steps.stop(None)
            steps.step()
            state.check()
        steps.close()

    live(ee.ElasticState(build=build, first=lambda state: fill(state.model), step=0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--megabytes", type=float, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = in_process if args.in_process else plain
    run(args)


if __name__ == "__main__":
    main()
