"""`elastic-etcd completion SHELL`: a script with which a shell completes our commands and flags.

It is made of the parsers by shtab, once; a shell that has it asks nobody.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from elastic_etcd.cli import events, options, report, status, steer, timeline
from elastic_etcd.cli.flags import WITHOUT_MEANING
from elastic_etcd.cli.live import serve, top
from elastic_etcd.errors import ElasticEtcdError, UsageError
from elastic_etcd.frameworks import accelerate

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
examples:
  elastic-etcd completion bash > ~/.local/share/bash-completion/completions/elastic-etcd
  elastic-etcd completion zsh > ~/.zfunc/_elastic-etcd     # fpath+=~/.zfunc before compinit
  elastic-etcd completion fish > ~/.config/fish/completions/elastic-etcd.fish

`python -m elastic_etcd.launch` is completed by no shell; `elastic-etcd launch` is the same.

exit codes:
  0 printed     2 wrong usage, or shtab is missing: pip install 'elastic_etcd[completion]'
"""


def parser() -> options.Parser:
    """The command line of `elastic-etcd completion SHELL`."""
    made = options.Parser(
        prog="elastic-etcd completion",
        usage="elastic-etcd completion SHELL",
        description="Prints what makes a shell complete commands and flags.",
        epilog=_EPILOG,
        formatter_class=options.Help,
    )
    made.add_argument("shell", metavar="SHELL", choices=_SHELLS, help="bash, zsh or fish")
    return made


def commands() -> list[options.Parser]:
    """The command line of each command, as `elastic-etcd` has them."""
    looking = [each.parser() for each in (status, top, events, report, serve, timeline)]
    steering = [make() for make, _ in steer.COMMANDS.values()]
    launching = [options.build_parser({}, "elastic-etcd launch"), accelerate.parser()]
    return [*launching, *looking, *steering, parser()]


def main(argv: Sequence[str]) -> int:
    """Print the script; gives the exit code."""
    try:
        shell = parser().parse_args(argv).shell
        print(_script(shell))
    except ElasticEtcdError as error:
        print(f"error: {options.shown(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


def _script(shell: str) -> str:
    try:
        import shtab  # noqa: PLC0415 - only this command needs it
    except ModuleNotFoundError as error:
        needs = "pip install 'elastic_etcd[completion]'"
        raise UsageError(f"completion {shell}: {error}; {needs}") from error
    made = commands()
    files = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "script": shtab.FILE}
    without_meaning = [flag.dest for flag in WITHOUT_MEANING.flags]
    for action in (each for command in made for each in command._actions):  # noqa: SLF001
        # Each flag once, as in --help.
        action.option_strings = [name for name in action.option_strings if "_" not in name]
        if action.dest in without_meaning:
            action.help = argparse.SUPPRESS
        if action.metavar in files:
            action.complete = files[action.metavar]  # type: ignore[attr-defined] # shtab's
    return str(shtab.complete(_all(made), shell))


def _all(commands: list[options.Parser]) -> argparse.ArgumentParser:
    """A parser that has them as its subcommands."""
    by_prog = {command.prog: command for command in commands}
    root = argparse.ArgumentParser(prog="elastic-etcd")
    root.add_argument("--version", action="store_true", help="print the version")
    given = root.add_subparsers(  # type: ignore[call-overload] # anything that makes a parser will do
        parser_class=lambda prog, **_: by_prog[prog]
    )
    for command in commands:
        given.add_parser(command.prog.split()[-1], help=command.description)
    return root
