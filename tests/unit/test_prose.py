"""The prose of docstrings and documents: a sentence begins with its subject, or its verb."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_etcd

PACKAGE = Path(elastic_etcd.__file__).parent
ROOT = PACKAGE.parent
SOURCES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent.name != "pb")
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Its subject would be far from its verb.
ODD = re.compile(r"[\W\d_]*(What|Who|Where|One|Of)\b")


def named(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


def docstrings(file: Path) -> Iterator[str]:
    has_one = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, has_one):
            yield from re.split(r"\n\s*\n|\n\s*- ", ast.get_docstring(node) or "")


def paragraphs(document: Path) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables, without code, headings and tables' heads."""
    text = re.sub(
        r"^( *)(```|~~~).*?^\1\2", "", document.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"^#.*|^\|.*\|\n(?=\|[ :|-]+\|$)", "", text, flags=re.MULTILINE)
    yield from re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\|", text)


def odd(paragraph: str) -> list[str]:
    """The sentences that begin so; a question may."""
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[.!?]\*\*)\s+", paragraph.strip())
    return [s for s in sentences if ODD.match(s) and not s.rstrip("*").endswith("?")]


@pytest.mark.parametrize("file", SOURCES, ids=named)
def test_a_docstring_begins_with_its_subject(file: Path) -> None:
    assert [sentence for text in docstrings(file) for sentence in odd(text)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_sentence_of_a_document_begins_with_its_subject(document: Path) -> None:
    assert [sentence for text in paragraphs(document) for sentence in odd(text)] == []


def test_an_odd_sentence_is_found() -> None:
    assert odd("**Time.** What it costs is this. Whatever!\nWhere it goes?") == [
        "What it costs is this."
    ]
