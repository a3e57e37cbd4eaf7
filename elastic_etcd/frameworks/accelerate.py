"""`elastic-etcd accelerate`: command line and file of `accelerate launch`, for an elastic job.

accelerate itself says what it would set in the environment (frameworks/accelerate_environment.py);
the rest is the launcher's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic_etcd import launch
from elastic_etcd.cli import parsers
from elastic_etcd.cli.flags import WITHOUT_MEANING, Flag
from elastic_etcd.errors import ElasticEtcdError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PROG = "elastic-etcd accelerate"
_PROGRAM = Path(__file__).with_name("accelerate_environment.py")
_EPILOG = f"""\
Takes the flags of `elastic-etcd launch`, and those of `accelerate launch` before the script. The
workers get the environment that `accelerate launch` would set (ACCELERATE_..., FSDP_...), which
accelerate itself makes of its file and its flags; everything else is the launcher's. A flag that
both have (--role, --tee, --max-restarts, ...) is the launcher's.

  num_machines     --nnodes, a fixed number of nodes, where --nnodes is not given
  num_processes    of all machines: --nproc-per-node, where that is not given
  machine_rank, main_process_ip, main_process_port, rdzv_backend     no meaning; a line says why

TPUs, SageMaker and mpirun are refused. See docs/frameworks.md.

examples:
  the same line on every node, at any time:
    {_PROG} --etcd etcd1:2379 --job resnet-7 --nnodes 2:8 \\
        --config-file fsdp.yaml train.py --lr 0.1
  one machine, without a file and without an etcd of your own:
    {_PROG} --nproc-per-node 2 --mixed-precision bf16 train.py

{parsers.EXIT_CODES}"""
# accelerate's names of what has no meaning here, and torchrun's, whose reasons hold.
_WITHOUT_MEANING = {
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
    "rdzv_backend": "rdzv_backend",
}


def parser() -> parsers.Parser:
    """The command line of `elastic-etcd accelerate`, without what accelerate itself knows."""
    made = parsers.build_parser({}, _PROG)
    made.description = "Runs a script of accelerate's as an elastic job."
    made.epilog = _EPILOG
    config_file = Flag(
        "--config-file",
        "the file that `accelerate config` has written",
        metavar="FILE",
        by_default="accelerate's own, if it is there",
    )
    parsers.add_flags(made, "accelerate", [config_file], {})
    return made


def main(argv: Sequence[str]) -> int:
    """Run this node's agent as `accelerate launch` would run its workers; gives the exit code."""
    try:
        answer = _ask(argv)
        sizes, remarks = _sizes(answer, os.environ)
    except ElasticEtcdError as error:
        print(f"error: {parsers.shown(str(error))}", file=sys.stderr)
        return error.exit_code
    os.environ.update(answer["environment"])
    return launch.main([*sizes, *answer["flags"], *answer["script"]], _PROG, remarks)


def _ask(argv: Sequence[str]) -> dict[str, Any]:
    """Ask accelerate what it makes of this command line. Raises UsageError."""
    made = parser()
    if not argv or argv[0] in ("-h", "--help"):
        made.parse_args(argv)
    actions = made._actions  # noqa: SLF001 - argparse has no other way
    flags = {name: each.nargs != 0 for each in actions for name in each.option_strings}
    del flags["--config-file"], flags["--config_file"]  # that one is accelerate's
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    try:
        done = subprocess.run(
            [python, "-P", str(_PROGRAM)],
            input=json.dumps({"argv": [*argv], "flags": flags}).encode(),
            stdout=subprocess.PIPE,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"{python} can't load accelerate: {error}") from error
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        hint = f"\npip install {answer['missing']} there" if "missing" in answer else ""
        raise UsageError(f"{answer['error']}{hint}\nSee {_PROG} --help.")
    return answer


def _sizes(answer: Mapping[str, Any], env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Flags for the numbers of nodes and workers, and a line for each thing of no meaning here."""
    made = parser()
    made.set_defaults(nnodes=None, nproc_per_node=None)
    args = made.parse_args([*answer["flags"], *answer["script"]])
    of_meeting = answer["meeting"]
    machines, processes = of_meeting.get("num_machines", 1), of_meeting.get("num_processes", -1)
    flags, remarks = [], [*_remarks(of_meeting)]
    if not (args.nproc_per_node or env.get("PET_NPROC_PER_NODE")) and processes > 0:
        flags.append(f"--nproc-per-node={max(1, processes // machines)}")
    if args.nnodes or args.standalone or env.get("PET_NNODES"):
        if "num_machines" in of_meeting:
            remarks.append(f"num_machines {machines} has no meaning here: --nnodes counts")
    elif machines > 1:
        flags.append(f"--nnodes={machines}")
        remarks.append(f"num_machines {machines} is --nnodes {machines}: give MIN:MAX instead")
    return flags, remarks


def _remarks(of_meeting: Mapping[str, Any]) -> Iterator[str]:
    reasons = {flag.dest: flag.text for flag in WITHOUT_MEANING.flags}
    for name, torchruns in _WITHOUT_MEANING.items():
        if name in of_meeting:
            yield f"{name} {of_meeting[name]} has no meaning here: {reasons[torchruns]}"
