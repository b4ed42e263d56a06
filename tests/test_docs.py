"""What README, CONTRIBUTING and docs/ refer to exists: pages and their headings, files, and functions in files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    path
    for folder in ("src", "benchmarks", "configs", "scripts", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {"", ".py", ".toml", ".proto"} and path.is_file() and path != Path(__file__)
    if path.parent.suffix != ".egg-info"  # a copy of the README as it was when the package was installed
]

LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"(?<![\w/.*-])((?:[\w.-]+/)*[\w-]+\.(?:py|proto|toml|md|jsonl?|svg|png|txt))(?:::([\w.]+))?(?![\w*])")
PAGE = re.compile(r"\bdocs/[\w-]+\.md\b")
BESIDE = {
    ROOT,
    ROOT / "docs",
    ROOT / "results",
    ROOT / "results" / "links",
    ROOT / "results" / "failures",
    ROOT / "benchmarks" / "quality",
    ROOT / "src" / "skerry",
    ROOT / "src" / "skerry" / "core",
}
"""Folders that names in the text may be relative to."""
OF_A_RUN = {"my.toml", "link.json", "tokenizer.json"}
OF_A_RUN |= {f"{name}.json" for name in ("run", "config", "standing", "account", "result", "manifest")}
OF_A_RUN |= {"metrics.jsonl", "plan.txt", "PLAN.toml", "CONFIG.toml", "PART.json", "loss.png"}
"""Files that a run or its user makes."""


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    prose = FENCE.sub("", text_of(page))
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def names_in(source: Path) -> set[str]:
    """Functions, classes and methods: `name`, and `Class.name`."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)))
            found |= {f"{node.name}.{one.name}" for one in inner}
    return found


def broken_links(page: Path, text: str) -> Iterator[str]:
    for words, target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        found = (page.parent / place).resolve() if place else page
        if not found.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors(found):
            yield f"{target}: the page has no such heading"
        elif "::" in words and found.suffix == ".py":
            file, _, name = words.strip("`").partition("::")
            if not found.as_posix().endswith(f"/{file}") or name.removesuffix("()") not in names_in(found):
                yield f"{words}: {found.name} has no {name}"


def missing_files(text: str) -> Iterator[str]:
    """Paths named in the text, not as a link; those in commands too."""
    for path, name in FILE.findall(LINK.sub(" ", text)):
        if path.startswith(("runs/", "RUN/", "http", "www.")) or Path(path).name in OF_A_RUN or path.isupper():
            continue
        places = [folder / path for folder in BESIDE if (folder / path).is_file()]
        if not places:
            yield f"{path}: there is no such file"
        elif name and not any(name in names_in(place) for place in places):
            yield f"{path}::{name}: there is no such function"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_refers_to_exists(page: Path) -> None:
    text = text_of(page)
    assert not [*broken_links(page, text), *missing_files(text)]


def test_sources_name_pages_that_exist() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {page}"
        for path in SOURCES
        for page in PAGE.findall(path.read_text("utf-8", errors="ignore"))
        if not (ROOT / page).is_file()
    }
    assert not wrong


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            ahead += [(page.parent / target.partition("#")[0]).resolve() for _, target in LINK.findall(text_of(page)) if target]
    assert not set(PAGES) - reached - {ROOT / "CHANGELOG.md"}


@pytest.mark.parametrize(
    "text",
    [
        "[x](docs/nowhere.md)",
        "[x](docs/protocol.md#no-such-heading)",
        "[x](#no-such-heading)",
        "![x](docs/images/nothing.png)",
        "[rounds.py::no_such_function](src/skerry/core/rounds.py)",
        "[merge.py::settle](src/skerry/core/rounds.py)",
        "[syncer/rounds.py::settle](src/skerry/core/rounds.py)",
    ],
)
def test_a_broken_link_is_found(text: str) -> None:
    assert list(broken_links(ROOT / "README.md", text))


@pytest.mark.parametrize(
    "text",
    ["see `core/nothing.py`", "`core/rounds.py::no_such_function`", "python benchmarks/nothing.py", "in docs/nowhere.md"],
)
def test_a_name_of_a_missing_file_is_found(text: str) -> None:
    assert list(missing_files(text))


@pytest.mark.parametrize(
    "text",
    [
        "[rounds.py::settle](src/skerry/core/rounds.py)",
        "[`rounds.py::Rounds.settle`](src/skerry/core/rounds.py)",
        "[x](#results)",
    ],
)
def test_a_link_that_leads_somewhere_passes(text: str) -> None:
    assert not list(broken_links(ROOT / "README.md", text))
