"""The documents name files, functions and words that are there."""

import html
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import elastic_etcd
from elastic_etcd.cli.parsers import EXIT_CODES, build_parser
from elastic_etcd.core.schema import Keys
from elastic_etcd.core.view import Narrow, covered
from scripts.docs_lib import recording

ROOT = Path(__file__).parents[2]
PACKAGE = Path(elastic_etcd.__file__).parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("tests/*/*.md")])
ARCHITECTURE = (ROOT / "docs" / "contributing" / "architecture.md").read_text()
GLOSSARY = ARCHITECTURE.partition("## Glossary")[2]
ROOMS = {
    str(folder.relative_to(PACKAGE))
    for folder in PACKAGE.rglob("*")
    if (folder / "__init__.py").exists() and folder.name != "pb"
}
DOTTED = "|".join(sorted((room.replace("/", r"\.") for room in ROOMS), key=len, reverse=True))
AT_ROOT = ("docs", "elastic_etcd", "examples", "protos", "scripts", "tests")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def quoted(page: Path) -> Iterator[str]:
    """What stands in backquotes outside of code blocks, up to the first space or `::`."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for text in re.findall(r"`([^`\n]+)`", prose):
        yield re.split(r"[ :]", text)[0]


def paths(page: Path) -> Iterator[Path]:
    """The paths of our tree among what is quoted: `agent/x.py`, `tests/y`, `scripts/z`."""
    for text in quoted(page):
        first, slash, _ = text.partition("/")
        if not slash or set(text) & set("*…<{"):
            continue
        if first in AT_ROOT:
            yield ROOT / text
        elif text.rpartition("/")[0] in ROOMS and text.endswith(".py"):
            yield PACKAGE / text


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    assert [str(path) for path in paths(page) if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_that_are_named_exist(page: Path) -> None:
    """Those of a clone, also where they stand in a block of code."""
    named = re.findall(r"(?<![\w/.])scripts/([a-z][\w.-]*\w)", page.read_text())
    assert [command for command in named if not (ROOT / "scripts" / command).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, named in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {named}(" in (ROOT / file).read_text(), named


def test_each_nothing_in_the_table_of_neighbours_names_a_test() -> None:
    page = (ROOT / "docs" / "contributing" / "security.md").read_text()
    table = page.partition("## What a neighbour may do")[2].partition("\n\nSo: ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    head, *neighbours = rows
    assert len(neighbours) == 6
    for neighbour, *cells in neighbours:
        assert len(cells) == len(head) - 1, neighbour
        for before, cell in pairwise(("", *cells)):
            named = re.findall(r"`tests/", before if "nothing: the same" in cell else cell)
            assert named or "nothing" not in cell, (neighbour, cell)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_named_in_a_module_is_there(page: Path) -> None:
    """`core.rules.decide`: the module's file, and the name in it."""
    dotted = re.compile(rf"({DOTTED})\.(\w+)\.(\w+)")
    for match in filter(None, map(dotted.fullmatch, quoted(page))):
        room, module, named = match.groups()
        text = (PACKAGE / room.replace(".", "/") / f"{module}.py").read_text()
        assert re.search(rf"^(async def|def|class) {named}\b", text, re.MULTILINE), match[0]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"\w+:", link):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_links_to_a_function_name_one_that_is_there() -> None:
    links = re.findall(r"\[`(\w+)`\]\((\.\./\.\./[\w/]+\.py)\)", ARCHITECTURE)
    assert len(links) >= 5
    for named, file in links:
        text = (ROOT / "docs" / "contributing" / file).read_text()
        assert re.search(rf"^ *(async def|def|class) {named}\b", text, re.MULTILINE), named


def test_each_room_has_its_line() -> None:
    """A new one gets it under "Rooms" in docs/contributing/architecture.md."""
    rooms = re.findall(r"^\| `([\w/]+)/` \|", ARCHITECTURE.partition("## Rooms")[2], re.MULTILINE)
    outside = {"tests", "scripts", "examples", "protos"}
    assert set(rooms) - outside == {"elastic_etcd", *ROOMS}


def test_the_keys_that_everybody_mirrors_are_named() -> None:
    keys = Keys("/p/j")
    mirrored = covered(keys, Narrow(coordinator=5), lease=7)
    design = (ROOT / "docs" / "contributing" / "design.md").read_text()
    (told,) = re.findall(r"Everybody mirrors .*? at most: (.*?)\. Only", design, re.DOTALL)
    others = {keys.page(0), keys.member(5), keys.member(7)}
    whole = {get.key.removeprefix("/p/j/") for get in mirrored if get.key not in others}
    assert set(re.findall(r"`(\w+)`", told)) == whole


def test_each_flag_of_the_launcher_is_named() -> None:
    text = "".join(page.read_text() for page in PAGES)
    flags = [flag for flag in build_parser({})._option_string_actions if flag[:2] == "--"]
    missing = {flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)}
    assert {flag for flag in missing if "_" not in flag} == set()


def explained(glossary: str) -> list[str]:
    """Its words; one line may explain several."""
    heads = re.findall(r"^- (\*\*.+?\*\*): ", glossary, re.MULTILINE)
    return [word for head in heads for word in re.findall(r"\*\*([^*]+)\*\*", head)]


def test_the_glossary_has_each_word_once() -> None:
    words = explained(GLOSSARY)
    assert sorted(set(words)) == sorted(words)


def test_each_group_of_the_glossary_is_sorted() -> None:
    groups = re.split(r"^\*\*[^*]+\*\*$", GLOSSARY, flags=re.MULTILINE)
    for group in groups:
        words = explained(group)
        assert words == sorted(words)


def test_help_has_the_exit_codes_of_the_page() -> None:
    page = (ROOT / "docs/failures.md").read_text().partition("## Exit codes")[2]
    codes = set(re.findall(r"^\| (\d) \|", page, re.MULTILINE))
    assert set(re.findall(r"  (\d) [a-z]", EXIT_CODES)) == codes


def test_the_recording_is_drawn_from_a_run_of_the_demo() -> None:
    text = recording.FILE.read_text()
    lines = json.loads(html.unescape(text.partition("<metadata>")[2].partition("</metadata>")[0]))
    assert recording.drawn(lines) == text
    told = "\n".join(line for _, line in lines)
    for said in (
        "generation 2 (green is lost: its agent is gone)",
        "generation 3 (green joins)",
        "exited 0 and 0",
    ):
        assert said in told


def test_the_architecture_is_read_in_half_an_hour() -> None:
    assert len(ARCHITECTURE.splitlines()) <= 350
