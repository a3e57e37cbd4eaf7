"""As elastic.py, with samples that are streamed from shards."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import elastic_etcd as ee
from tests.support.trainers.elastic import Log, asked_to_stop

SIZES = [30, 7, 55, 21, 90, 37]  # 240 samples


def read(shard: int, start: int) -> Iterator[int]:
    first = sum(SIZES[:shard])
    return iter(range(first + start, first + SIZES[shard]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    log = Log(args.dir)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    data = ee.ElasticIterable(range(len(SIZES)), read, lengths=SIZES, buffer=8, seed=3)
    loader = data.loader(2, num_workers=2)
    state = ee.ElasticState(model=model, data=data, step=0)

    @ee.run
    def train(state: ee.ElasticState) -> None:
        ddp = DistributedDataParallel(model)
        log.write("start", step=state.step)
        while True:
            for batch in loader:
                ddp(batch[:, None] / 240).sum().backward()
                time.sleep(0.03)
                data.record()
                state.step += 1
                log.samples(state.step, data.epoch, batch.tolist(), 0)
                log.write("step", step=state.step, loss=0)
                state.commit()
                if asked_to_stop(args.dir):
                    return
                state.check()
            data.set_epoch(data.epoch + 1)

    train(state)
    log.write("end")


if __name__ == "__main__":
    main()
