"""Lines of a package's own source that hold code: no blank lines, comments or docstrings."""

import ast
import io
import os
import tokenize
from pathlib import Path

LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT}


def code_lines(folder: Path) -> int:
    """Of all Python files, and of Metal sources that are files of their own."""
    total = 0
    for place, _, names in os.walk(folder, followlinks=True):
        for path in (Path(place, name) for name in names):
            if path.suffix == ".py":
                total += len(python_lines(path.read_text(encoding="utf-8")))
            elif path.suffix == ".metal":
                lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
                total += sum(bool(line) and not line.startswith("//") for line in lines)
    return total


def python_lines(source: str) -> set[int]:
    """Numbers of the lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and is_text(node.value):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
