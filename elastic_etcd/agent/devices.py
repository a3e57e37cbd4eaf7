"""How many workers `--nproc-per-node` means, and the CPUs of each for `--numa-binding`.

Both without torch in this process.
"""

from __future__ import annotations

import json
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
_ASK_DEVICES = """
import sys, torch
auto = getattr(torch, "accelerator", torch.cuda)  # new in torch 2.6
own = torch._C._get_privateuse1_backend_name()  # that a package has registered, as torch_npu does
known = {"gpu": torch.cuda, "xpu": torch.xpu, "auto": auto, own: getattr(torch, own, None)}
device = known.get(sys.argv[1])
print("unknown" if device is None else device.device_count() if device.is_available() else 0)
"""
_ASK_NUMA = """
import json, sys
from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to
options, gpus = NumaOptions(affinity_mode=AffinityMode(sys.argv[1])), range(int(sys.argv[2]))
cpus = [_get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options) for gpu in gpus]
print(json.dumps([sorted(each) for each in cpus]))
"""
_NVIDIA, _AMD = "nvidia[0-9]*", "kfd"  # the GPUs that torch.cuda may have
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# An entry that may be a GPU: "", -1 and Slurm's NoDevFiles are none, nor is what follows them.
_GPU = re.compile(r"\s*(?:\+?(\d+)|GPU-|MIG-)")
_TORCH_TIMEOUT = 300  # a first import of torch from a cold network disk takes minutes


def count_devices(spec: str, env: Mapping[str, str] | None = None) -> int:
    """The number of workers that `spec` asks for on this machine, as torchrun counts them.

    Raises UsageError for a text that is no spec, a number below 1, and devices that are not here.
    """
    env = os.environ if env is None else env
    if spec == "cpu":
        return _cpus()
    if spec.isidentifier() and (count := _accelerators(spec, env)) is not None:
        if count == 0 and spec != "auto":
            hidden = ", ".join(f"{name} is {env[name]!r}" for name in _VISIBLE if name in env)
            raise UsageError(
                f"--nproc-per-node {spec}: no {spec.upper()} found on this machine"
                f"{f' ({hidden})' if hidden else ''}.\nGive a number, or --nproc-per-node cpu."
            )
        return count or _cpus()
    if not re.fullmatch(r"[0-9]+", spec) or int(spec) < 1:
        raise UsageError(
            f"--nproc-per-node {spec}: give a number of workers of at least 1, or gpu, cpu, xpu, "
            "auto, or the name of a backend that torch has."
        )
    return int(spec)


def are_visible(env: Mapping[str, str]) -> bool:
    """Whether this machine has GPUs, and these variables leave some of them to torch.cuda."""
    return any(
        any(Path("/dev").glob(nodes)) and all(_GPU.match(env.get(name, "0")) for name in names)
        for nodes, names in ((_NVIDIA, _VISIBLE[:1]), (_AMD, _VISIBLE))
    )


def cpus_near_gpus(mode: str, nproc: int, env: Mapping[str, str] | None = None) -> list[str]:
    """The CPUs of each local rank, as "0,1,8": near the GPU of that number, as torch finds them.

    `mode` is one of torch's (`torch.numa.binding.AffinityMode`). Raises UsageError.
    """
    flag = f"--numa-binding {mode}"
    try:
        answer = _ask_torch(_ASK_NUMA, mode, str(nproc), env=os.environ if env is None else env)
        found = [",".join(map(str, cpus)) for cpus in json.loads(answer)]
    except ValueError as error:
        raise UsageError(
            f"{flag}: torch can't say which CPUs are near the GPU of each worker:\n{error}\n"
            "It needs torch 2.13, and a GPU for each worker. Start without it, or bind the workers "
            "by a program: --no-python numactl"
        ) from error
    if not all(found):
        raise UsageError(f"{flag}: this process may run on none of the CPUs near a GPU: {answer}")
    return found


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _accelerators(spec: str, env: Mapping[str, str]) -> int | None:
    """How many of these there are; None: torch knows none of that name."""
    if spec in ("gpu", "auto"):
        visible = _visible(env.get("CUDA_VISIBLE_DEVICES"), _nvidia_gpus(env))
        if visible is not None:
            return visible
    here = any(any(Path("/dev").glob(pattern)) for pattern in _DEVICE_NODES)
    if spec in ("gpu", "auto", "xpu") and not here:
        return 0
    try:
        answer = _ask_torch(_ASK_DEVICES, spec, env=env)
        return None if answer == "unknown" else int(answer)
    except ValueError as error:
        raise UsageError(
            f"--nproc-per-node {spec}: torch could not count the devices:\n{error}\n"
            "Give a number instead."
        ) from error


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
    number = _GPU.match(entry)
    return int(number[1]) if number and number[1] and int(number[1]) < len(uuids) else None


def _ask_torch(question: str, *args: str, env: Mapping[str, str]) -> str:
    """The last line that the workers' torch prints, in a process that ends before theirs begin.

    Raises ValueError with its last line where that fails.
    """
    python = env.get("PYTHON_EXEC", sys.executable)
    try:
        answer = subprocess.run(
            [python, "-c", question, *args],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip()
        raise ValueError(f"{python}: {words.splitlines()[-1]}") from error
    return ["", *answer.stdout.strip().splitlines()][-1]
