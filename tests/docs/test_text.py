"""What the documentation says about the code is true of the code: links, names, options, errors."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from docs.site import on_page_markdown
from dspine_mlx.cli import app
from tests.support.documentation import PAGES, ROOT, anchors, prose
from tests.support.understanding import nothing_served, subcommands

SOURCES = ("dspine_mlx", "cli", "convert", "metal")
ELSEWHERE = {"docs/notes/peers.md"}  # names options of other packages


# ---- links


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for kind, link in prose(page):
        if kind == "code" or "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(str(target.resolve().relative_to(ROOT))), link


def test_the_index_has_every_page() -> None:
    linked = {link for kind, link in prose("docs/README.md") if kind == "link"}
    pages = {page.removeprefix("docs/") for page in PAGES} - {"README.md"}
    assert pages <= linked


def test_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert sorted(re.findall(r": ([\w/-]+\.md)$", site, re.MULTILINE)) == sorted(pages)


@pytest.mark.parametrize("page", PAGES)
def test_the_site_hides_marks_for_the_tests(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    shown = on_page_markdown(text)
    assert "needs=" not in shown
    assert shown.count("```") == text.count("```")


def test_pictures_are_small() -> None:
    largest = {".png": 60_000, ".svg": 200_000}
    for picture in (ROOT / "docs" / "images").glob("*"):
        assert picture.stat().st_size < largest[picture.suffix]


# ---- options in running text


@cache
def options_of(name: str) -> set[str]:
    """The options of a command; of all commands and scripts for the empty name."""
    if name == "serve":
        with nothing_served():
            text = CliRunner().invoke(app, ["serve", "--help"]).stdout
        assert "--draft-model" in text
        return set(re.findall(r"--[a-z][a-z-]+", text))
    if name:
        command = dict(subcommands(typer.main.get_command(app)))[name]
        return {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    names = [name for name, _ in subcommands(typer.main.get_command(app))]
    scripts = [path.read_text() for at in ("tests/bench", "recipes") for path in modules(at)]
    mentioned = set(re.findall(r"--[a-z][a-z-]+", "\n".join(scripts)))
    general = {"--debug", "--version", "--install-completion", "--show-completion", "--help"}
    return mentioned.union(general, *map(options_of, names))


def modules(folder: str) -> Iterator[Path]:
    yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("page", sorted(set(PAGES) - ELSEWHERE))
def test_options_that_are_named_exist(page: str) -> None:
    commands = {name for name, _ in subcommands(typer.main.get_command(app))}
    for kind, text in prose(page):
        if kind != "code":
            continue
        called = re.match(r"dspine-mlx ((?:train )?[a-z]+)", text)
        if called is not None and called[1] != "train":
            assert called[1] in commands, text
        known = options_of(called[1] if called and called[1] != "train" else "")
        assert set(re.findall(r"(?<!\S)--[a-z][a-z-]+", text)) <= known, text


# ---- names in the map from papers to code


def rows_of_the_map() -> Iterator[tuple[str, str]]:
    """(file, name) of each row."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    yield from re.findall(r"\| `([\w/]+\.py)` \| `([\w.]+)` \|$", text, re.MULTILINE)


@pytest.mark.parametrize(("file", "name"), rows_of_the_map())
def test_names_of_the_map_are_in_their_files(file: str, name: str) -> None:
    module = file.removesuffix(".py").replace("/", ".")
    package = module if module.startswith("dspine_mlx") else f"dspine_mlx.{module}"
    owner, _, attribute = name.partition(".")
    thing = vars(import_module(package))[owner]
    assert thing.__module__ == package
    defined = rf"\b(self\.{attribute}|def {attribute})\b"
    assert not attribute or re.search(defined, inspect.getsource(thing))


def test_the_map_is_read_whole() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.count("|") >= 5 and ".py`" in line]
    assert len(list(rows_of_the_map())) == len(rows) > 30


# ---- sentences that the package prints


def pattern(node: ast.AST) -> str | None:
    """What a string in the source can become: a regular expression, or None for short ones."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = [re.escape(part) for part in node.value.split("%s")]
    elif isinstance(node, ast.JoinedStr):
        parts = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts[-1] += re.escape(str(value.value))
            else:
                parts.append("")
    else:
        return None
    return "(.*)".join(parts) if sum(map(len, parts)) > 12 else None


@cache
def patterns() -> list[re.Pattern[str]]:
    found = set()
    for folder in SOURCES:
        for path in modules(folder):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found.add(pattern(node))
    return [re.compile(p, re.DOTALL) for p in found if p is not None]


def is_printed(sentence: str) -> bool:
    """Whether the package can print it; a long part that is filled in must be one of its own."""
    return any(
        all(part.count(" ") <= 5 or is_printed(part) for part in found.groups())
        for found in (p.fullmatch(sentence) for p in patterns())
        if found is not None
    )


def quoted() -> list[str]:
    """The block quotes of the page on troubleshooting."""
    tokens = MarkdownIt().parse((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    depth, sentences = 0, []
    for token in tokens:
        depth += {"blockquote_open": 1, "blockquote_close": -1}.get(token.type, 0)
        if depth and token.type == "inline":
            sentences.append(token.content)
    return sentences


@pytest.mark.parametrize("sentence", quoted())
def test_quoted_sentences_are_the_packages_own(sentence: str) -> None:
    assert is_printed(sentence)


def test_other_sentences_are_not() -> None:
    assert len(quoted()) > 20
    assert not is_printed("this drafter does not fit this target: its nose has 3 holes, not just 2")
    assert not is_printed("drafting was parked for 3 tokens")


def test_the_shell_completes_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = typer.main.get_command(app)
    for words, completion in (
        ("dspine-mlx cal", "calibrate"),
        ("dspine-mlx bench --sui", "--suite"),
    ):
        monkeypatch.setenv("_DSPINE_MLX_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            program.main([], prog_name="dspine-mlx")
        assert completion in capsys.readouterr().out.split()
