"""A language model with transformers' Trainer: accumulated gradients, cosine, TensorBoard.

torchrun --nproc-per-node 2 with_transformers.py --output runs/1
python -m elastic_etcd.launch --nnodes 2 with_transformers.py --output runs/1
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import elastic_etcd as ee

SYMBOLS, LENGTH = 32, 16


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="of each worker")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--save-every", type=int, default=10, help="steps, in memory")
    parser.add_argument("--disk-every", type=int, default=40, help="steps, on the disk")
    parser.add_argument("--workers", type=int, default=2, help="of the data loader")
    parser.add_argument("--samples", type=int, default=1600)
    parser.add_argument("--read-seconds", type=float, default=0.0, help="of one text, at least")
    return parser.parse_args()


class Texts(Dataset[dict[str, Tensor]]):
    """Counting in steps of one to four."""

    def __init__(self, samples: int, seed: int, read_seconds: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(SYMBOLS, (samples, 1), generator=generator)
        stride = torch.randint(1, 5, (samples, 1), generator=generator)
        self.ids = (start + stride * torch.arange(LENGTH)) % SYMBOLS
        self.read_seconds = read_seconds

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.read_seconds)
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class InMemory(TrainerCallback):
    def __init__(self, args: argparse.Namespace) -> None:
        self.disk, self.disk_every = args.output / "checkpoints", args.disk_every

    def on_save(self, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
        written = Path(args.output_dir, f"checkpoint-{state.global_step}")
        dist.barrier()  # all workers of this node have written
        with ee.memory_checkpoint(
            state.global_step, disk=self.disk, disk_every=self.disk_every
        ) as folder:
            if folder and args.local_process_index == 0:
                for file in written.iterdir():
                    file.rename(folder / file.name)
                shutil.rmtree(written)
                weights = folder / "model.safetensors"
                if not weights.exists():  # transformers 5.23 writes them on rank 0 only
                    safetensors.torch.save_model(model, str(weights), {"format": "pt"})


class Curve(TrainerCallback):
    """The loss of each step in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_log(self, args: Any, state: Any, *_: Any, logs: Any, **__: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            step, loss, lr = state.global_step, float(logs["loss"]), logs["learning_rate"]
            with (self.folder / "curve.csv").open("a") as file:
                file.write(f"{step},{loss!r},{lr!r},{args.world_size}\n")


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    set_seed(0)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(args.output / "tensorboard")
    memory = os.environ.get("ELASTIC_ETCD_MEMORY", str(args.output))
    arguments = TrainingArguments(
        output_dir=f"{memory}/trainer",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        bf16=args.bf16,
        use_cpu=True,
        save_steps=args.save_every,
        save_on_each_node=True,
        logging_steps=1,
        report_to="tensorboard",
        eval_strategy="epoch",
        dataloader_num_workers=args.workers,
        dataloader_drop_last=True,
        disable_tqdm=True,
        seed=0,
    )
    config = GPT2Config(
        vocab_size=SYMBOLS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Texts(args.samples, 1, args.read_seconds),
        eval_dataset=Texts(256, 2),
        callbacks=[InMemory(args), Curve(args.output)],
    )
    rank, world = arguments.process_index, arguments.world_size
    print(f"rank {rank} of {world}: pid {os.getpid()}", flush=True)
    path = ee.latest_checkpoint(disk=args.output / "checkpoints")
    trainer.train(resume_from_checkpoint=path and str(path))
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        trainer.save_model(str(args.output / "model"))
        print("loss", loss)


if __name__ == "__main__":
    main()
