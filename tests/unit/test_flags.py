"""The table of flags, and its copy in docs/flags.md.

`REWRITE=1 python -m pytest tests/unit/test_flags.py` writes it there; git shows what has changed.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import fields

from elastic_etcd.agent.config import AgentConfig, LogConfig
from elastic_etcd.cli.flags import FLAGS, SECTIONS, Flag
from elastic_etcd.cli.options import default_in_words
from elastic_etcd.core.schema import Limits
from elastic_etcd.launcher import LaunchConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "flags.md"
TABLE = re.compile(r"^\| flag \|.*?(?=^\n)", re.DOTALL | re.MULTILINE)


def table() -> Iterator[str]:
    yield "| flag | default | |"
    yield "|---|---|---|"
    for section in SECTIONS:
        yield f"| **{section.title}** | | {in_code(section.more)} |".replace("  ", " ")
        yield from (row(flag) for flag in section.flags if not flag.hidden)


def row(flag: Flag) -> str:
    names = flag.names.split()
    value = flag.value_name or ", ".join(flag.choices or ())
    names[-1] += f" {value}" if value else ""
    spelt = ", ".join(f"`{name}`" for name in names).replace("|", r"\|")
    meaning = in_code(". ".join(filter(None, (flag.text, flag.more))))
    return f"| {spelt} | {in_code(default_in_words(flag))} | {meaning} |".replace("|  |", "| |")


def in_code(text: str) -> str:
    """What a reader may have to type, as code."""
    typed = r"--[a-z][a-z-]*[a-z]|ee\.\w+|[A-Z]+_[A-Z_]+|/(?:dev/\w+|elastic_etcd)"
    return re.sub(rf"(?<![`\w])({typed})", r"`\1`", text)


def test_the_document_has_the_table() -> None:
    document = DOCUMENT.read_text()
    meant = "".join(f"{line}\n" for line in table())
    if os.environ.get("REWRITE"):
        DOCUMENT.write_text(TABLE.sub(lambda _: meant, document))
    else:
        assert TABLE.findall(document) == [meant]


def test_each_field_that_a_flag_sets_is_there() -> None:
    homes = {"": set(AgentConfig.__dataclass_fields__), "log": set(LogConfig.__dataclass_fields__)}
    homes["limits"] = {field.name for field in fields(Limits)}
    assert [
        flag.to for flag in FLAGS if flag.to and flag.field[1] not in homes[flag.field[0]]
    ] == []
    set_by = [flag.to for flag in FLAGS if flag.to]
    assert sorted(set(set_by)) == sorted(set_by)


def test_each_name_is_one_flags() -> None:
    names = [name for flag in FLAGS for name in flag.names.split()]
    keys = [key for flag in FLAGS for key in flag.rdzv_conf]
    for each in (names, keys):
        assert sorted(set(each)) == sorted(each)


def test_each_field_of_launch_config_that_a_flag_means_is_there() -> None:
    meant = {flag.in_python for flag in FLAGS if flag.in_python}
    assert meant <= LaunchConfig.__dataclass_fields__.keys()
