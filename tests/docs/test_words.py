"""Words that the project no longer uses, with what to say instead; they are looked for by area.

accepted, not stood or stands          probs or distribution, not law
with evidence, not weighed             greedy path, not outlook
budget, not ledger                     chances, not belief
verified or offered, not admitted      per, not "a": tokens per round
past or after, not behind              downloaded, not "had"; active, not "in the house"
mode, not way (of decoding)            divergence, not fork
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.support.documentation import PAGES, ROOT

AMOUNTS = "blocks|bytes|files|FLOP|GFLOP|launches|lines|MB|minutes|numbers|operations|prompts"
AMOUNTS += "|requests|rounds|rows|seconds|steps|texts|tokens"
UNITS = "block|byte|file|hour|layer|line|method|minute|mode|prompt|request|round|row|run|second"
UNITS += "|sequence|slot|step|subcommand|text|token"
IN_PROSE = re.compile(
    r"\b(stands?(?![- ](?:for|ins?|out)\b)|stood|laws?|weighs?|weighed|outlooks?|ledgers?|beliefs?"
    r"|admitted|worths|owed)\b"
    rf"|\b({AMOUNTS}) an? ({UNITS})\b|\bbe had\b|\bin the house\b|\b(from|to) behind\b",
    re.IGNORECASE,
)
IN_NAMES = re.compile(  # parts of snake_case and CamelCase, then whole names
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:stands?(?!_ins?(?![a-z]))|stood|laws?|weighs?"
    r"|outlook|ledger|belief|admitted|worths?|owed|usual)(?![a-z])"
    r"|(?:^|(?<!give)(?<!gives)_)(?:ways?|forks?)(?=_|$)"
    r"|^(?:add_ends|with_ends|ENDS|Independent|Trimmed|Windowed|Contest|Crowd|Asked"
    r"|examined|at_once|longest_kept)$"
)
SOURCES = ("dspine_mlx", "metal", "convert", "cli")
Piece = tuple[str, str]  # where it is, and its text


# ---- pieces of text by area


def pages() -> Iterator[Piece]:
    """Prose of the documentation, without code; what is quoted is the package's own messages."""
    others = ("CHANGELOG.md", "CONTRIBUTING.md", "dspine_mlx/demo/README.md", "tests/msl/README.md")
    for page in (*PAGES, *others):
        yield from prose(page, (ROOT / page).read_text(encoding="utf-8"))


def prose(page: str, text: str) -> Iterator[Piece]:
    quotes = 0
    for token in MarkdownIt().enable("table").parse(text):
        quotes += {"blockquote_open": 1, "blockquote_close": -1}.get(token.type, 0)
        if token.type == "inline" and not quotes and token.map is not None:
            words = [" " if c.type.endswith("break") else c.content for c in token.children or []]
            codes = [c.type == "code_inline" for c in token.children or []]
            plain = "".join("`" if c else w for w, c in zip(words, codes, strict=True))
            yield f"{page}:{token.map[0] + 1}", plain


def sources() -> Iterator[tuple[str, str]]:
    paths = {path.resolve() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    for path in sorted(paths):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def files_of_tests() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != Path(__file__):
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in docstring_nodes(ast.parse(source)):
        yield node.lineno, re.sub(r"\s+", " ", str(node.value))


def docstring_nodes(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Strings with a space in them that are no docstrings: messages, help texts, table heads."""
    tree = ast.parse(source)
    apart = {id(node) for node in docstring_nodes(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text and id(node) not in apart:
                yield node.lineno, text


def values(source: str) -> Iterator[tuple[int, str]]:
    """Strings of one word: settings, keys."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if " " not in text:
                yield node.lineno, text


def inline_code() -> Iterator[Piece]:
    """What the pages mark as code in their sentences."""
    for page in PAGES:
        for token in MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8")):
            for child in token.children or []:
                if child.type == "code_inline":
                    yield page, child.content


def names(source: str) -> Iterator[tuple[int, str]]:
    """Functions, classes, arguments, variables and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


# ---- what is found


def found_in(
    files: Iterator[tuple[str, str]], find: Callable[[str], Iterator[tuple[int, str]]]
) -> Iterator[Piece]:
    for path, source in files:
        for line, text in find(source):
            yield f"{path}:{line}", text


AREAS: dict[str, tuple[Callable[[], Iterator[Piece]], re.Pattern[str]]] = {
    "docs": (pages, IN_PROSE),
    "comments": (lambda: found_in(sources(), comments), IN_PROSE),
    "docstrings": (lambda: found_in(sources(), docstrings), IN_PROSE),
    "messages": (lambda: found_in(sources(), messages), IN_PROSE),
    "names": (lambda: found_in(sources(), names), IN_NAMES),
    "tests' comments": (lambda: found_in(files_of_tests(), comments), IN_PROSE),
    "tests' docstrings": (lambda: found_in(files_of_tests(), docstrings), IN_PROSE),
    "tests' names": (lambda: found_in(files_of_tests(), names), IN_NAMES),
}


@pytest.mark.parametrize("area", AREAS)
def test_retired_words_are_gone(area: str) -> None:
    pieces, retired = AREAS[area]
    found = [f"{where}: {m[0]!r} in {t!r}" for where, t in pieces() for m in retired.finditer(t)]
    assert found == []


def test_a_retired_value_is_read_in_one_place_and_explained_in_another() -> None:
    """Stored runs have it."""
    law = re.compile(r"\blaws?\b")
    paths = [*sources(), *((str(p), p.read_text("utf-8")) for p in (ROOT / "recipes").glob("*.py"))]
    found = [path for path, source in paths for _, text in values(source) if law.search(text)]
    assert found == ["dspine_mlx/train/config.py"]
    assert [page for page, code in inline_code() if law.search(code)] == ["docs/training.md"]


# ---- they would be found

SAMPLE = '''
class RoundLedger:
    """A drafted token that stands."""

    def outlook(self, draft_law: float) -> str:
        stood = self.lawful = draft_law  # two tokens a round
        return f"{stood} of the draft stood" + "law"
'''


def test_they_would_be_found_in_sources() -> None:
    def found(find: Callable[[str], Iterator[tuple[int, str]]], words: re.Pattern[str]) -> set[str]:
        return {m[0] for _, text in find(SAMPLE) for m in words.finditer(text)}

    assert found(docstrings, IN_PROSE) == {"stands"}
    assert found(comments, IN_PROSE) == {"tokens a round"}
    assert found(messages, IN_PROSE) == {"stood"}
    assert found(names, IN_NAMES) == {"Ledger", "outlook", "law", "stood"}


def test_idioms_are_no_retired_names() -> None:
    fine = ("stand_in", "test_connections_give_way", "WINDOWED", "lawful", "away")
    assert not any(IN_NAMES.search(name) for name in fine)
    assert all(IN_NAMES.search(name) for name in ("way", "ways_for", "first_fork", "MyOutlook"))


def test_they_would_be_found_in_prose() -> None:
    text = "Ten tokens\na round: the *Law* of `stood`.\n\n> it stood\n\n"
    text += "| a | b |\n| - | - |\n| 1 | owed |\n"
    found = [m[0] for _, piece in prose("page", text) for m in IN_PROSE.finditer(piece)]
    assert found == ["tokens a round", "Law", "owed"]
    assert not IN_PROSE.search("outstanding lawyers understand what a token is worth per round")
