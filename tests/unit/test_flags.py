"""The table of flags, and its copy in docs/flags.md.

`REWRITE=1 python -m pytest tests/unit/test_flags.py` writes it there; git shows what has changed.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import fields

from elastic_etcd.__main__ import main
from elastic_etcd.agent.config import AgentConfig, LogConfig
from elastic_etcd.cli.flags import FLAGS, GONE, GONE_COMMANDS, SECTIONS, Flag
from elastic_etcd.cli.parsers import build_parser, default_in_words
from elastic_etcd.core.schema import Limits
from elastic_etcd.errors import UsageError
from elastic_etcd.launcher import LaunchConfig

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "flags.md"
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


@pytest.mark.parametrize("name", GONE)
def test_a_flag_that_is_gone_says_what_to_do_instead(name: str) -> None:
    meant = f"{name} is gone: {GONE[name]}"
    for given in (
        [name],
        [name.replace("-", "_").replace("__", "--", 1)],
        [f"{name}=x"],
        [name, "x"],
    ):
        with pytest.raises(UsageError) as refused:
            build_parser({}).parse_args([*given, "train.py", "--lr", "1"])
        assert meant.split(" ", 1)[1] in str(refused.value)
    variable = f"PET_{name[2:].replace('-', '_').upper()}"
    with pytest.raises(UsageError, match=variable) as refused:
        build_parser({variable: "x"})
    assert meant in str(refused.value)
    assert name not in {each for flag in FLAGS for each in flag.long}


@pytest.mark.parametrize("name", GONE_COMMANDS)
def test_a_command_that_is_gone_says_what_to_do_instead(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "job"]) == 2
    assert capsys.readouterr().err == f"error: {name} is gone: {GONE_COMMANDS[name]}\n"


def test_the_page_has_what_is_gone() -> None:
    page = DOCS / "migration.md"
    named = {f"`{name}`": instead for name, instead in GONE.items()}
    named |= {f"`elastic-etcd {name}`": instead for name, instead in GONE_COMMANDS.items()}
    rows = "".join(f"| {name} | {instead} |\n" for name, instead in named.items())
    before, head, _ = page.read_text().partition("| gone | instead |\n|---|---|\n")
    if os.environ.get("REWRITE"):
        page.write_text(before + head + rows)
    assert page.read_text() == before + head + rows


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


def test_torchruns_handler_has_the_keys_of_its_document() -> None:
    keys = (DOCS / "plugin.md").read_text().partition("Keys are flags of our launcher: ")[2]
    shown = re.findall(r"`(\w+)`", keys.partition(". ")[0])
    assert sorted(shown) == sorted(flag.dest for flag in FLAGS if flag.in_plugin)


def test_the_python_api_has_the_fields_of_its_document() -> None:
    fields = LaunchConfig.__dataclass_fields__.keys()
    rows = (DOCS / "python.md").read_text().partition("| field |")[2].partition("\n\n")[0]
    shown = [
        name
        for cell in re.findall(r"^\| (.*?) \|", rows, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert {*shown, "logs_specs"} == fields
    assert {flag.in_python for flag in FLAGS if flag.in_python} <= fields
