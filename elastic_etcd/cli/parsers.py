"""The command lines, as argparse reads them: the launcher's, of the table in flags.py.

Every flag has torchrun's underscore form and reads `PET_<FLAG>` from the environment. A flag of
torchrun's that has no meaning here stays accepted.
"""

from __future__ import annotations

import argparse
import os
import re
from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_etcd.agent.config import AgentConfig, LogConfig
from elastic_etcd.cli import flags
from elastic_etcd.cli.flag_values import truth
from elastic_etcd.core.schema import Limits
from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.access import EtcdConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from elastic_etcd.cli.flags import Flag

COMMAND = "python -m elastic_etcd.launch"

_ENDPOINTS = "ETCDCTL_ENDPOINTS"
EXIT_CODES = """\
exit codes:
  0 the job succeeded              1 training failed            2 wrong usage
  3 restart budget used up         4 no rendezvous in time      5 etcd unreachable or denied
  130, 143 left an unfinished job on SIGINT, SIGTERM (--leave-exit-code), or at once on a second;
           143 also where it was drained, or the job was stopped (--stop-exit-code)
  7 a newer elastic_etcd has written to this job       9 restarts made no progress
  8 this node is not fit to train (--health-check)
"""
EPILOG = f"""\
examples:
  two to eight nodes, a worker per GPU; the same line on every node, at any time:
    {COMMAND} --etcd etcd1:2379,etcd2:2379 --job resnet-7 \\
        --nnodes 2:8 --nproc-per-node gpu train.py --lr 0.1
  one machine, without an etcd of your own:
    {COMMAND} --nproc-per-node 2 train.py

{EXIT_CODES}"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as it is written, with each flag once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Leave out the underscore forms, which would double the length of the help."""
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        value = self._format_args(action, action.dest.upper())
        return ", ".join(names) + (f" {value}" if value else "")


class Parser(argparse.ArgumentParser):
    """Raises UsageError with a hint where argparse prints its whole usage and exits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of flags that go together; they raise ArgumentTypeError.
        self.checks: list[Callable[[argparse.Namespace], None]] = []
        self._ambiguous: dict[str, str] = {}

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Find the flag of an abbreviation; none if that is ambiguous, which `error` then says.

        Argparse calls it for the script's arguments, too, before it knows that they are the
        script's. A flag's two spellings are one.
        """
        found: list[Any] = super()._get_option_tuples(option_string)
        names = {id(each[0]): each[1] for each in reversed(found)}
        if len(names) <= 1:
            return found[:1]
        self._ambiguous[option_string.partition("=")[0]] = ", ".join(sorted(names.values()))
        return []

    def error(self, message: str) -> NoReturn:
        if missing := re.match(r"the following arguments are required: (\w+)", message):
            message = f"no {missing[1].lower()} given"
        message = re.sub(r"/--[a-z]+(?:_[a-z]+)+", "", message).removeprefix("argument ")
        unknown = re.match(r"unrecognized arguments: (-[^ =]+)", message)
        if unknown and (instead := flags.GONE.get(unknown[1].replace("_", "-"))):
            raise UsageError(f"{unknown[1]} is gone: {instead}")
        if unknown and (matches := self._ambiguous.get(unknown[1])):
            message, unknown = f"ambiguous option: {unknown[1]} could match {matches}", None
        hint = self._nearest(unknown[1]) if unknown else ""
        raise UsageError(f"{message}{hint}\nSee {self.prog} --help.")

    def _nearest(self, flag: str) -> str:
        from difflib import get_close_matches  # noqa: PLC0415 - only for this message

        known = [name for action in self._actions for name in action.option_strings]
        flag = flag.replace("_", "-")
        stem = flag[:-1]  # --nprocs is further from --nproc-per-node than from --nnodes
        longer = [name for name in known if name.startswith(stem)] if len(stem) > len("--a") else []
        nearest = longer or get_close_matches(flag, known, n=1)
        return f" (did you mean {nearest[0]}?)" if nearest else ""


def add_flags(parser: Parser, title: str, added: Iterable[Flag], env: Mapping[str, str]) -> None:
    """Add flags under one title; each also gets its underscore form and its PET_ variable."""
    group = parser.add_argument_group(title)
    for flag in added:
        underscored = (f"--{name[2:].replace('-', '_')}" for name in flag.long)
        names = dict.fromkeys((*flag.names.split(), *underscored))
        default = _default_in(env, flag)
        help_text = argparse.SUPPRESS if flag.hidden else help_of(flag)
        if flag.kind is None:
            group.add_argument(
                *names, action="store_true", default=default or False, help=help_text
            )
            continue
        group.add_argument(
            *names,
            action="extend" if flag.repeated else "store",
            type=str if flag.choices else flag.kind,
            choices=flag.choices,
            default=default,
            metavar=flag.value_name,
            help=help_text,
        )


def _default_in(env: Mapping[str, str], flag: Flag) -> Any:
    """The default of a flag: what the environment says, or else its own."""
    for name in flag.long:
        variable = variable_of(name)
        if (text := env.get(variable)) is not None:
            if flag.choices and text not in flag.choices:  # argparse does not check defaults
                choices = ", ".join(flag.choices)
                raise UsageError(f"{variable}={text} in the environment: give one of {choices}")
            try:
                return (flag.kind or truth)(text)
            except (ValueError, ArgumentTypeError) as error:
                if not text.strip():
                    raise _empty(variable) from error
                raise UsageError(f"{variable}={text} in the environment: {error}") from error
    return default_of(flag)


def variable_of(name: str) -> str:
    """The variable of the environment that gives the flag `name`: PET_NNODES for --nnodes."""
    return f"PET_{name[2:].replace('-', '_').upper()}"


def _empty(variable: str) -> UsageError:
    """Says so; compose makes such a variable of a name that it does not know."""
    return UsageError(f"{variable} is in the environment, and empty: give it a value, or unset it")


def default_of(flag: Flag) -> Any:
    """The default of a flag that is not in the environment."""
    home, name = flag.field
    of = {"": AgentConfig, "limits": Limits(1, 1), "log": LogConfig}[home]
    return getattr(of, name) if name else flag.default


def default_in_words(flag: Flag) -> str:
    """The same for people, "" where there is none."""
    value = default_of(flag)
    if flag.by_default:
        return flag.by_default.format(value)
    match value:
        case bool():
            return "on" if value else ""
        case float():
            return f"{value:g}"
        case tuple():
            return ",".join(each.name for each in value)
    return str(value or "")


def help_of(flag: Flag) -> str:
    """The flag's line in --help."""
    default = default_in_words(flag)
    return f"{flag.text} (default: {default})" if default else flag.text


def build_parser(env: Mapping[str, str], prog: str = COMMAND) -> Parser:
    """The launcher's parser, with defaults from the PET_ variables of `env`.

    Raises UsageError for one of these that names a flag that is gone.
    """
    for name, instead in flags.GONE.items():
        if (variable := variable_of(name)) in env:
            raise UsageError(f"{variable} is in the environment, and {name} is gone: {instead}")
    parser = Parser(
        prog=prog,
        usage=f"{prog} [options] script [argument ...]",
        description="Runs a torchrun script as an elastic job: nodes may die, leave and join, and "
        "training goes on with those that are there.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    for section in flags.SECTIONS:
        add_flags(parser, section.title, section.flags, env)
    parser.add_argument("training_script", metavar="script", help="the training program")
    parser.add_argument(
        "training_script_args",
        metavar="argument",
        nargs=argparse.REMAINDER,
        help="its arguments, passed on as they are; ${local_rank} is filled in",
    )
    return parser


def fields_of(args: argparse.Namespace, home: str = "") -> dict[str, Any]:
    """The fields that flags set as they are: of AgentConfig, of its `limits`, or of its `log`."""
    of_home = (flag for flag in flags.FLAGS if flag.to and flag.field[0] == home)
    return {flag.field[1]: getattr(args, flag.dest) for flag in of_home}


def etcd_of(args: argparse.Namespace, env: Mapping[str, str]) -> EtcdConfig | None:
    """The etcd of the flags in CONNECTION; None where they name none. Raises UsageError."""
    if args.password is not None:
        raise UsageError(
            "--password: a password on the command line can be read by every user of this machine; "
            "put it in ELASTIC_ETCD_PASSWORD or in a --password-file"
        )
    if not args.etcd and not env.get(_ENDPOINTS, "-").strip():
        raise _empty(_ENDPOINTS)
    return EtcdConfig.parse(
        args.etcd,
        cacert=args.cacert,
        cert=args.cert,
        key=args.key,
        user=args.user,
        password_file=args.password_file,
        env=env,
    )


def this_node(env: Mapping[str, str]) -> str:
    """This machine's node, where nobody has named it."""
    return env.get("SLURMD_NODENAME") or os.uname().nodename


def shown(text: str) -> str:
    """A text of somebody else's, without what could steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
