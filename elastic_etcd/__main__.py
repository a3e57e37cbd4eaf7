"""`elastic-etcd`, also `python -m elastic_etcd`: run this node's agent, see a job, steer it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from elastic_etcd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_USAGE = """\
usage: elastic-etcd launch [options] script [argument ...]   run this node's agent
       elastic-etcd accelerate [options] script [arg ...]    the same, configured by accelerate
       elastic-etcd status [options] JOB                     what a job does and went through
       elastic-etcd top [options] JOB                        the same on a screen that follows it
       elastic-etcd events [options] JOB                     the same, an event a line; --follow
       elastic-etcd report [options] JOB                     how much of its time it trained
       elastic-etcd serve [options] [JOB]                    all jobs on pages for a browser
       elastic-etcd timeline [options] JOB --out FILE        what each node did, as a drawing
       elastic-etcd drain [options] JOB NODE                 make a node leave, and keep it out
       elastic-etcd undrain [options] JOB NODE               let it come back
       elastic-etcd scale [options] JOB NODES                change how many nodes train
       elastic-etcd stop [options] JOB                       end a job on all nodes
       elastic-etcd completion SHELL                         complete these commands in a shell
       elastic-etcd --version

Each has --help, and those with a JOB take --all instead, but for scale. `elastic-etcd launch` is
`python -m elastic_etcd.launch`.\
"""


# Each command whose module has a `main` of its own.
_MODULES = {
    "accelerate": "frameworks.accelerate",
    "completion": "cli.completion",
    "events": "cli.events",
    "report": "cli.report",
    "serve": "cli.live.serve",
    "status": "cli.status",
    "timeline": "cli.timeline",
    "top": "cli.live.top",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; gives the exit code."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command == "launch":
        from elastic_etcd import launch  # noqa: PLC0415 - a command loads what it needs

        return launch.main(rest, prog="elastic-etcd launch")
    if command in _MODULES:
        return int(import_module(f"elastic_etcd.{_MODULES[command]}").main(rest))
    if command in ("drain", "undrain", "scale", "stop"):
        from elastic_etcd.cli import steer  # noqa: PLC0415 - as above

        return steer.main(command, rest)
    if command == "--version":
        print(f"elastic-etcd {__version__}")
        return 0
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    print(f"error: {command}: no such command\n{_USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
