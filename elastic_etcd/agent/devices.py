"""How many workers `--nproc-per-node gpu|cpu|auto|xpu|N` means, without torch in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_etcd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

# Importing torch takes seconds, so it is not asked on a machine that has none of these.
_DEVICE_NODES = ("nvidia*", "kfd", "dri/renderD*", "accel/*", "dxg")
_ASK_TORCH = """
import sys, torch
auto = getattr(torch, "accelerator", torch.cuda)  # new in torch 2.6
device = {"gpu": torch.cuda, "xpu": torch.xpu, "auto": auto}[sys.argv[1]]
print(device.device_count() if device.is_available() else 0)
"""
_TORCH_TIMEOUT = 300  # a first import of torch from a cold network disk takes minutes


def count_devices(spec: str, env: Mapping[str, str] | None = None) -> int:
    """The number of workers that `spec` asks for on this machine, as torchrun counts them.

    Raises UsageError for a text that is no spec, a number below 1, and devices that are not here.
    """
    env = os.environ if env is None else env
    if spec == "cpu":
        return _cpus()
    if spec in ("gpu", "auto", "xpu"):
        count = _accelerators(spec, env)
        if count == 0 and spec != "auto":
            name = "CUDA_VISIBLE_DEVICES"
            hidden = f" ({name} is {env[name]!r})" if name in env else ""
            raise UsageError(
                f"--nproc-per-node {spec}: no {spec.upper()} found on this machine{hidden}.\n"
                "Give a number, or --nproc-per-node cpu."
            )
        return count or _cpus()
    if not re.fullmatch(r"[0-9]+", spec) or int(spec) < 1:
        raise UsageError(
            f"--nproc-per-node {spec}: give a number of workers of at least 1, or gpu, cpu, xpu "
            "or auto."
        )
    return int(spec)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _accelerators(spec: str, env: Mapping[str, str]) -> int:
    if spec != "xpu":
        visible = _visible(env.get("CUDA_VISIBLE_DEVICES"), _nvidia_gpus(env))
        if visible is not None:
            return visible
    if not any(any(Path("/dev").glob(pattern)) for pattern in _DEVICE_NODES):
        return 0
    return _ask_torch(spec, env)


def _nvidia_gpus(env: Mapping[str, str]) -> list[str] | None:
    """The UUIDs of the GPUs in order; None if only torch can tell (no driver tool, MIG)."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if "UUID: MIG-" in found.stdout:
        return None
    return re.findall(r"^GPU \d+:.*\(UUID: (GPU-[^)]+)\)", found.stdout, re.MULTILINE) or None


def _visible(variable: str | None, uuids: list[str] | None) -> int | None:
    """How many of the GPUs CUDA_VISIBLE_DEVICES leaves; None if that is for torch to say.

    CUDA reads the list up to its first entry that is no GPU, and sees none at all when an entry
    is repeated (CUDA programming guide, "CUDA environment variables").
    """
    if uuids is None or variable is None:
        return None if uuids is None else len(uuids)
    entries = [entry.strip() for entry in variable.split(",")]
    if entries[0].startswith("MIG-"):
        return None
    seen: list[int] = []
    for entry in entries:
        index = _index(entry, uuids)
        if index is None:
            break
        if index in seen:
            return 0
        seen.append(index)
    return len(seen)


def _index(entry: str, uuids: list[str]) -> int | None:
    if entry.startswith("GPU-"):  # any prefix of a UUID that fits one GPU only
        fitting = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return fitting[0] if len(fitting) == 1 else None
    number = re.match(r"\+?(\d+)", entry)
    return int(number[1]) if number and int(number[1]) < len(uuids) else None


def _ask_torch(spec: str, env: Mapping[str, str]) -> int:
    """The devices that the workers' torch counts, in a process that ends before that."""
    python = env.get("PYTHON_EXEC", sys.executable)
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_TORCH, spec],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT,
            check=True,
        )
        return int(answer.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        stderr = getattr(error, "stderr", None) or str(error)
        raise UsageError(
            f"--nproc-per-node {spec}: {python} with torch could not count the devices:\n"
            f"{stderr.strip().splitlines()[-1]}\nGive a number instead."
        ) from error
