"""The documents as a site: what scripts/docs builds, read as files and in a real browser."""

import os
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from elastic_etcd.__main__ import command_parsers
from elastic_etcd.cli import parsers
from tests.support.chromium import chromium
from tests.support.debian import NotToBeHad
from tests.support.job import ROOT

# The first time, pip has to download. Links are looked at in test_docs.py, too.
pytestmark = [pytest.mark.nightly(part="packaging"), pytest.mark.timeout(600)]

SITE = ROOT / "build" / "site"
DESKTOP, PHONE = 1280, 390  # pixels
SHOWN = (
    "index",
    "docs/cookbook",
    "docs/tutorial_nodes",
    "docs/flags",
    "reference/launch",
    "reference/python",
)


FITS = "code => code.scrollWidth <= code.clientWidth"


def build(**env: str) -> "subprocess.CompletedProcess[str]":
    command = [ROOT / "scripts" / "docs"]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    done = build()
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_leads_nowhere_and_what_the_contents_leave_out_fail_it(tmp_path: Path) -> None:
    pages = shutil.copytree(ROOT / "build" / "docs", tmp_path / "pages")
    with (pages / "docs" / "contributing" / "chaos.md").open("a") as page:
        page.write("[a](nowhere.md) [b](keys.md#nothing) [c](/docs/contributing/keys.md)\n")
    (pages / "docs" / "another.md").write_text("# Another\n")
    done = build(PAGES=str(pages), SITE=str(tmp_path / "site"))
    assert done.returncode == 1
    for fault in (
        "'nowhere.md'",
        "'keys.md#nothing'",
        "'/docs/contributing/keys.md'",
        "docs/another.md",
    ):
        assert fault in done.stderr
    assert "Aborted with 4 warnings in strict mode" in done.stderr


class Shown(HTMLParser):
    """The text of a page's article, or of all of it, and how often it has what."""

    TAGS = ("table", "tr", "ul", "ol", "li", "h1", "h2", "h3", "h4", "em", "strong")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.text = ""
        self._beside = False  # what the site adds
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._beside = dict(attrs).get("class") in ("filename", "headerlink")
        self.tags[tag] += tag in self.TAGS

    def handle_endtag(self, _: str) -> None:
        self._beside = False

    def handle_data(self, data: str) -> None:
        if not self._beside:
            self.text += re.sub(r"\s", "", data)


def test_a_page_shows_what_its_document_says() -> None:
    """As CommonMark reads it; the site's own reader has other rules for lists and emphasis."""
    markdown = MarkdownIt("commonmark").enable("table")
    documents = (ROOT / "docs").rglob("*.md")
    pages = {file: file.relative_to(ROOT).with_suffix(".html") for file in documents}
    for document, page in {**pages, ROOT / "README.md": Path("index.html")}.items():
        article = re.findall(r"<article.*?>(.*)</article>", (SITE / page).read_text(), re.DOTALL)[0]
        meant, shown = Shown(markdown.render(document.read_text())), Shown(article)
        assert shown.text == meant.text, document
        assert shown.tags == meant.tags, document


class Loaded(HTMLParser):
    """What a page has a browser load by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"link": ("href",), "a": ()}.get(tag, ("src", "srcset", "data", "poster"))
        self.found += [value for name, value in attrs if name in names and value]


def test_nothing_is_loaded_from_elsewhere() -> None:
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loaded = Loaded(page.read_text()).found
        assert loaded
        assert [url for url in loaded if re.match(r"(https?:)?//", url)] == [], page
    for style in SITE.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\W*(https?:)?//", style.read_text()), style


def command(parser: parsers.Parser) -> str:
    return parser.prog.split()[-1]


@pytest.mark.parametrize("parser", list(command_parsers()), ids=command)
def test_each_command_has_a_page_with_its_flags(parser: parsers.Parser) -> None:
    page = (SITE / "reference" / f"{command(parser)}.html").read_text()
    flags = re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", parser.format_help(), re.MULTILINE)
    assert [flag for flag in flags if flag != "--help" and flag not in page] == []
    assert "<h3" in page


@contextmanager
def served() -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.nightly(part="chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    with ExitStack() as scope:
        try:
            page = scope.enter_context(chromium(tmp_path))
        except NotToBeHad as reason:
            pytest.skip(str(reason))
        site = scope.enter_context(served())
        for name in SHOWN:
            for width in (DESKTOP, PHONE):
                page.open(f"{site}{name}.html", width=width)
                page.shows(
                    f"document.readyState === 'complete' && location.href.endsWith('{name}.html')"
                )
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
                assert page.evaluate(f"[...document.querySelectorAll('pre>code')].every({FITS})"), (
                    name
                )
        page.open(f"{site}index.html?q=undrain")
        page.shows("!!document.querySelector('.md-search-result__item')")
        assert page.complaints() == []
        asked = {url for url in page.requests() if not url.startswith(("data:", "about:"))}
        assert len(asked) > len(SHOWN)
        assert [url for url in asked if not url.startswith(site)] == []


@pytest.mark.nightly(part="chromium")
def test_n10_the_search_works_from_a_disk(tmp_path: Path) -> None:
    with ExitStack() as scope:
        try:
            page = scope.enter_context(chromium(tmp_path))
        except NotToBeHad as reason:
            pytest.skip(str(reason))
        page.open(f"{(SITE / 'index.html').as_uri()}?q=undrain")
        page.shows("document.readyState === 'complete'")
        page.evaluate("document.querySelector('.md-search__input').focus()")
        page.shows("!!document.querySelector('.md-search-result__item')")
        assert page.complaints() == []
        assert [url for url in page.requests() if url.startswith("http")] == []
