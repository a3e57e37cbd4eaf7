"""As elastic.py, on a device of a machine that may have one GPU for all.

Beside the log there is a file that ends in .device: a line for each world, with what this process
has had on its device since it began.
"""

import argparse
import ctypes
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import elastic_etcd as ee
from elastic_etcd.train import sync_point
from tests.support.trainers.elastic import NODE, Log, Numbers, asked_to_stop, happen

LENGTH = 240


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", help="default: ee.run's")
    parser.add_argument("--stuck", type=int, default=-1, help="rank 1 of world 1, after this step")
    return parser.parse_args()


def own_device(kind: str) -> torch.device:
    """Workers of nodes n1, n2 and so on, which are one machine, take its GPUs in turn."""
    if kind == "cpu":
        return torch.device("cpu")
    before = (int(NODE.removeprefix("n")) - 1) * int(os.environ["LOCAL_WORLD_SIZE"])
    number = before + int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Kept:
    """What a process that lives on keeps on its device."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._path = directory / f"{NODE}.{os.getpid()}.device"
        self._device = device
        self._tensor = torch.arange(1 << 16, device=device)

    def write(self) -> None:
        """A tensor of its beginning; on a GPU also its context, and what the allocator gave back"""
        cuda = self._device.type == "cuda"
        line = {
            "generation": int(os.environ["ELASTIC_ETCD_GENERATION"]),
            "device": str(self._device),
            "pointer": self._tensor.data_ptr(),
            "sum": int(self._tensor.sum()),
            "context": context() if cuda else 0,
            "freed": torch.cuda.memory_stats(self._device)["num_device_free"] if cuda else 0,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def context() -> int:
    """The address of this thread's CUDA context."""
    found = ctypes.c_void_p()
    error = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    assert error == 0, error
    assert found.value is not None, "this thread has no CUDA context"
    return found.value


def main() -> None:
    args = arguments()
    log = Log(args.dir)
    device = own_device(args.device)
    kept = Kept(args.dir, device)
    here = (os.environ["ELASTIC_ETCD_GENERATION"], os.environ["RANK"]) == ("1", "1")
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler = ee.ElasticSampler(LENGTH, seed=3, tail="uneven")
    loader = DataLoader(Numbers(LENGTH), 2, sampler=sampler)
    state = ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler, step=0)
    options = {} if args.backend == "gloo" else {"device_id": device}

    @ee.run(backend=args.backend, **options)
    def train(state: ee.ElasticState) -> None:
        ddp = DistributedDataParallel(model)
        kept.write()
        log.write("start", step=state.step)
        while True:
            for batch in state.steps(loader, commit_every=1):
                loss = ddp(batch[:, None].to(device) / LENGTH).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                if here and state.step == args.stuck:
                    log.write("stuck")
                    happen("stuck")
                optimizer.step()
                torch.zeros(1, device=device).item()  # all that was queued is done
                sync_point.current().raise_if_broken()  # it may be garbage, which is not to count
                time.sleep(0.03)
                state.step += 1
                log.samples(state.step, sampler.epoch, batch.tolist(), loss.item())
                log.write("step", step=state.step, loss=loss.item())
                if asked_to_stop(args.dir, device):
                    return
            sampler.set_epoch(sampler.epoch + 1)

    train(state)
    log.write("end")


if __name__ == "__main__":
    main()
