"""The map in docs/architecture.md has every module of the library, and nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.support.documentation import ROOT

SOURCES = ("dspine_mlx", "metal", "convert", "cli")


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Paths in a tree of names, each indented below its folder and followed by what it is."""
    folders = dict[int, str]()
    for line in filter(None, text.splitlines()):
        name, _, description = line.strip().partition(" ")
        depth = line.index(name)
        folders = {at: folder for at, folder in folders.items() if at < depth}
        yield "".join(folders.values()) + name, description.strip()
        if name.endswith("/"):
            folders[depth] = name


def the_map() -> list[tuple[str, str]]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return list(entries(next(t.content for t in MarkdownIt().parse(page) if t.type == "fence")))


def modules() -> set[str]:
    """Source files that define something, each once: dspine_mlx/ has links to other folders."""
    paths = {path.resolve() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    return {str(path.relative_to(ROOT)) for path in paths if defines(path)}


def defines(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not isinstance(line, ast.Expr) for line in body)


@pytest.mark.parametrize("path", [path for path, _ in the_map()])
def test_what_the_map_names_exists(path: str) -> None:
    there = ROOT / path
    assert there.is_dir() if path.endswith("/") else there.is_file()


def test_every_module_is_on_the_map_once() -> None:
    paths = [path for path, _ in the_map()]
    assert modules() - set(paths) == set()
    assert len(paths) == len(set(paths))


def test_every_module_is_described() -> None:
    assert [path for path, what in the_map() if not what and path != "dspine_mlx/"] == []


def test_a_tree_is_read_by_its_indentation() -> None:
    tree = "a/\n  b.py   x y\n  c/     y\n    d.py z\n\n  e.py   w\nf/ v\n  g.py\n"
    assert dict(entries(tree)) == {
        "a/": "",
        "a/b.py": "x y",
        "a/c/": "y",
        "a/c/d.py": "z",
        "a/e.py": "w",
        "f/": "v",
        "f/g.py": "",
    }


def for_types_only(path: Path) -> set[str]:
    """Modules of ours that are imported for their types."""
    blocks = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if is_guard(node)]
    imports = [n for block in blocks for n in ast.walk(block) if isinstance(n, ast.ImportFrom)]
    return {n.module for n in imports if n.module and n.module.startswith("dspine_mlx")}


def is_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_no_import_for_types_hides_a_circle() -> None:
    """The commands import what they need when it is needed; so does the package itself."""
    lazy = {ROOT / "dspine_mlx" / "__init__.py", *(ROOT / "cli").glob("*.py")}
    hidden = {path: for_types_only(path) for path in lazy}
    assert any(hidden.values())  # the check sees them
    paths = {path.resolve() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    assert [path for path in paths - lazy if for_types_only(path)] == []
