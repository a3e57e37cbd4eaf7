"""`accelerate_environment.py` tells what `accelerate launch` would set for its workers.

`elastic-etcd accelerate` runs it by its path, with the Python of the workers, as accelerate loads
torch. It reads one JSON object, {argv, flags}, and writes one: {environment, flags, script,
meeting}, or {error}. All of accelerate's own code runs, but for what starts processes. It loads the
standard library, accelerate and torch.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# What says how many processes there are, and where they meet, with accelerate's defaults.
_MEETING = {
    "num_machines": 1,
    "num_processes": -1,
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "rdzv_backend": "static",
}
_OF_EACH_WORLD = ("MASTER_ADDR", "MASTER_PORT")
_BELOW = "; workers of this launcher run below it, on machines with a CPU or GPUs"


class Refused(Exception):
    """Something can't work here; the text is the reason."""


def split(
    argv: Sequence[str], ours: Mapping[str, bool], theirs: Mapping[str, bool]
) -> tuple[list[str], list[str], list[str]]:
    """The launcher's flags, accelerate's, and the script with its arguments.

    `ours` and `theirs` say of each flag whether a value follows; one of both is the launcher's. A
    flag that neither knows is left to the launcher, which abbreviates, or says what is wrong.
    """
    mine: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, has_value, _ = word.partition("=")
        known, to = (ours, mine) if name in ours or name not in theirs else (theirs, others)
        to.append(word)
        if known.get(name) and not has_value and rest:
            to.append(rest.pop(0))
    return mine, others, rest


def answer(argv: Sequence[str], ours: Mapping[str, bool]) -> dict[str, Any]:
    """Say what accelerate makes of `argv`, or why it can't be; `ours` are the launcher's flags."""
    try:
        return _answer(argv, ours)
    except Refused as error:
        return {"error": str(error)}
    except ModuleNotFoundError as error:
        return {"error": f"{error} in {sys.executable}", "missing": error.name}
    except Exception as error:  # noqa: BLE001 - accelerate raises what it likes
        return {"error": f"accelerate: {error}"}


def _answer(argv: Sequence[str], ours: Mapping[str, bool]) -> dict[str, Any]:
    from accelerate.commands import launch  # noqa: PLC0415 - it loads torch

    parser = launch.launch_command_parser()
    parser.error = _refuse
    actions = parser._actions  # noqa: SLF001 - argparse has no other way
    theirs = {name: each.nargs != 0 for each in actions for name in each.option_strings}
    flags, others, script = split(argv, ours, theirs)
    args = parser.parse_args([*others, "script"])
    meeting = _meeting(args, launch)
    _be_second_of_two(args, meeting, flags)
    return {
        "environment": _environment(args, launch),
        "flags": flags,
        "script": script,
        "meeting": meeting,
    }


def _meeting(args: Any, launch: Any) -> dict[str, Any]:
    """The values of _MEETING in the command line, or else in the file, that are no defaults."""
    given: set[str] = getattr(args, "nondefault", set())
    there = args.config_file or (Path(launch.default_config_file).is_file() and not args.cpu)
    config = _config(args.config_file, launch) if there else None
    found = {name: getattr(args, name) for name in _MEETING if name in given}
    for name, default in _MEETING.items():
        value = getattr(config, name, default)
        if name not in found and value not in (None, default):
            found[name] = value
    return found


def _config(file: str | None, launch: Any) -> Any:
    name = file or launch.default_config_file
    if not Path(name).is_file():
        raise Refused(f"--config-file {name}: no such file (looked from {Path.cwd()})")
    try:
        return launch.load_config_from_file(file)
    except Exception as error:  # a YAML reader, and accelerate, raise what they like
        raise Refused(f"--config-file {name}: accelerate can't read it: {error}") from error


def _be_second_of_two(args: Any, meeting: Mapping[str, Any], flags: Sequence[str]) -> None:
    """Keep accelerate from seeking a free port, and from finding one GPU of a machine too few.

    It divides the machine's cores among the workers of one.
    """
    local = max(1, meeting.get("num_processes", 1) // max(1, meeting.get("num_machines", 1)))
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="given", nargs="?")
    given = parser.parse_known_args(flags)[0].given or os.environ.get("PET_NPROC_PER_NODE")
    if given:  # a word means the number of CPUs on a machine without GPUs
        local = int(given) if given.isdecimal() else os.cpu_count() or 1
    args.num_machines, args.machine_rank, args.num_processes = 2, 1, 2 * local
    args.main_process_ip, args.main_process_port = "127.0.0.1", 29500
    args.deepspeed_multinode_launcher = "standard"


def _environment(args: Any, launch: Any) -> dict[str, str]:
    """The variables that are set, or have another value than in this process's environment."""
    from torch.distributed import run  # noqa: PLC0415 - as above

    found: dict[str, str] = {}

    def keep(**environment: str) -> nullcontext[None]:
        found.update(environment)
        return nullcontext()

    def start(command: Sequence[str], env: Mapping[str, str]) -> SimpleNamespace:
        if command[0] != sys.executable:
            raise Refused(f"accelerate would start {command[0]}" + _BELOW)
        found.update(env)
        return SimpleNamespace(wait=lambda: None, returncode=0)

    launch.patch_environment = keep
    run.run = lambda _: None
    launch.subprocess = SimpleNamespace(Popen=start)
    tpu = "a TPU's processes are started by torch_xla" + _BELOW
    amazon = "compute_environment AMAZON_SAGEMAKER: Amazon starts such a job" + _BELOW
    launch.tpu_launcher = launch.tpu_pod_launcher = lambda _: _refuse(tpu)
    launch.sagemaker_launcher = lambda *_: _refuse(amazon)
    launch.launch_command(args)
    now = os.environ
    return {k: v for k, v in found.items() if now.get(k) != v and k not in _OF_EACH_WORLD}


def _refuse(message: str) -> NoReturn:
    raise Refused(message)


def main() -> None:
    """Answer one question."""
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    found = answer(asked["argv"], asked["flags"])
    with answers:
        json.dump(found, answers)


if __name__ == "__main__":
    main()
