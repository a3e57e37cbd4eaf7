"""`elastic-etcd`, also `python -m elastic_etcd`: run this node's agent, see a job, steer it."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from importlib import import_module
from typing import TYPE_CHECKING

from elastic_etcd.system.startup import open_standard_streams
from elastic_etcd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elastic_etcd.cli.parsers import Parser

_USAGE = """\
usage: elastic-etcd launch [options] script [argument ...]   run this node's agent
       elastic-etcd check [options]                          whether this node is fit for a job
       elastic-etcd status [options] JOB                     what a job does and went through
       elastic-etcd top [options] JOB                        the same on a screen that follows it
       elastic-etcd events [options] JOB                     the same, an event a line; --follow
       elastic-etcd report [options] JOB                     how much of its time it trained
       elastic-etcd serve [options] [JOB]                    all jobs on pages for a browser
       elastic-etcd wait [options] JOB                       until it is over, or --for training
       elastic-etcd drain [options] JOB NODE                 make a node leave, and keep it out
       elastic-etcd undrain [options] JOB NODE               let it come back
       elastic-etcd scale [options] JOB NODES                change how many nodes train
       elastic-etcd stop [options] JOB                       end a job on all nodes
       elastic-etcd forget [options] JOB                     remove the keys of one that is over
       elastic-etcd --print-completion SHELL | --version

Each has --help, and those with a JOB take --all instead, but for scale and wait.
`elastic-etcd launch` is `python -m elastic_etcd.launch`.\
"""


# Each command whose module has a `main` of its own.
_MODULES = {
    "check": "cli.check",
    "status": "cli.status",
    "top": "cli.live.top",
    "events": "cli.events",
    "report": "cli.report",
    "wait": "cli.wait",
    "serve": "cli.live.serve",
}


_STEERING = ("drain", "undrain", "scale", "stop", "forget")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; gives the exit code."""
    open_standard_streams()
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command == "launch":
        from elastic_etcd import launch  # noqa: PLC0415 - a command loads what it needs

        return launch.main(rest, prog="elastic-etcd launch")
    try:
        try:
            return _run_command(command, rest)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for Python's own attempt, at its end
        return 0


def _run_command(command: str, rest: list[str]) -> int:
    if command in _MODULES:
        return int(import_module(f"elastic_etcd.{_MODULES[command]}").main(rest))
    if command in _STEERING:
        from elastic_etcd.cli import steer  # noqa: PLC0415 - as above

        return steer.main(command, rest)
    if command == "--print-completion":
        return _print_completion([command, *rest])
    if command == "--version":
        print(f"elastic-etcd {__version__}")
        return 0
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    from difflib import get_close_matches  # noqa: PLC0415 - only for these messages

    from elastic_etcd.cli.flags import GONE_COMMANDS  # noqa: PLC0415

    if command in GONE_COMMANDS:
        print(f"error: {command} is gone: {GONE_COMMANDS[command]}", file=sys.stderr)
        return 2
    known = ["launch", *_MODULES, *_STEERING]
    hint = "".join(f" (did you mean {name}?)" for name in get_close_matches(command, known, n=1))
    print(f"error: {command}: no such command{hint}\nSee elastic-etcd --help.", file=sys.stderr)
    return 2


def command_parsers() -> Iterator[Parser]:
    """The command line of each command."""
    from elastic_etcd.cli import parsers, steer  # noqa: PLC0415 - as above

    yield parsers.build_parser({}, "elastic-etcd launch")
    for module in _MODULES.values():
        yield import_module(f"elastic_etcd.{module}").parser()
    for make, _ in steer.COMMANDS.values():
        yield make()


def _print_completion(argv: Sequence[str]) -> int:
    """As torchrun's flag, for all commands together."""
    try:
        import shtab  # noqa: PLC0415 - only this needs it
    except ModuleNotFoundError as error:
        print(f"error: --print-completion: {error}; pip install shtab", file=sys.stderr)
        return 2
    by_prog = {parser.prog: parser for parser in command_parsers()}
    root = ArgumentParser(prog="elastic-etcd")
    given = root.add_subparsers(parser_class=lambda prog, **_: by_prog[prog])  # type: ignore[call-overload] # any maker will do
    for prog, parser in by_prog.items():
        given.add_parser(prog.split()[-1], help=parser.description)
    shtab.add_argument_to(root).parse_args(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
