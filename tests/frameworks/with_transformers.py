"""docs/memory.md's recipe for transformers, in a script that tells the test what it does."""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import elastic_etcd as ee
from tests.support.trainers.saver import say


class Model(PreTrainedModel):
    """Its weights say how many steps they have been through."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(self.linear.weight)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        pass

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        return {"loss": -self.linear(torch.ones_like(x)).sum()}


class InMemory(TrainerCallback):
    """Moves what the trainer has saved to where it is found again."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        del control
        written = Path(args.output_dir, f"checkpoint-{state.global_step}")
        dist.barrier()  # all workers of this node have written
        with ee.memory_checkpoint(state.global_step) as folder:
            if folder and args.local_process_index == 0:
                for file in written.iterdir():
                    file.rename(folder / file.name)
                shutil.rmtree(written)
                weights = folder / "model.safetensors"
                if not weights.exists():  # transformers 5.23 writes them on rank 0 only
                    save_model(model, str(weights), {"format": "pt"})
        say("saved", state.global_step)


class Told(TrainerCallback):
    """For the test: where it begins, and the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        say("begins", state.global_step, os.getpid())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        del args
        weight = getattr(model, "module", model).linear.weight
        assert (weight == state.global_step).all(), (weight, state.global_step)
        stop = torch.tensor(float((self.folder / "stop").exists()))
        dist.all_reduce(stop)
        control.should_training_stop = bool(stop)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=f"{os.environ['ELASTIC_ETCD_MEMORY']}/trainer",
        save_steps=5,
        save_on_each_node=True,
        max_steps=100_000,
        per_device_train_batch_size=1,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"x": torch.ones(4)}] * 1000
    callbacks = [InMemory(), Told(args.dir)]
    trainer = Trainer(Model(PretrainedConfig()), arguments, train_dataset=data, callbacks=callbacks)
    path = ee.latest_checkpoint()
    trainer.train(resume_from_checkpoint=path and str(path))


if __name__ == "__main__":
    main()
