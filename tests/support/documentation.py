"""The documentation as data: pages, blocks, commands, and stand-ins for a user's own models."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile, groupby
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from dspine_mlx.load import DEMO

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
# Written after a fence's language, where no reader sees it: ```bash needs="a network"
NEEDS = {"a Mac", "several Macs", "a network", "a process of its own", "time"}
PLACEHOLDERS = {  # names in the documentation, and what tests put in their place
    "mlx-community/Qwen3-8B-4bit": str(DEMO / "target"),
    "TARGET": str(DEMO / "target"),
    "OWNER/DRAFTER": str(DEMO / "drafter"),
    "DRAFTER": str(DEMO / "drafter"),
}
COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*")|(?<!\S)#.*""")  # quoted texts are kept
QUESTIONS = [
    f"{name} has {n} {things}. His sister has {n - 3} fewer {things} than he has. "
    f"How many {things} do they have together?"
    for name, n in (("Tom", 9), ("Ali", 12))
    for things in ("toys", "books", "apples", "marbles", "stamps", "caps")
]
CHATS = "".join(
    json.dumps(
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "They have many."},
            ]
        }
    )
    + "\n"
    for question in QUESTIONS
)
FILES = {  # that a page's commands find in their folder
    "my-traffic.jsonl": CHATS,
    "prompts.jsonl": CHATS,
    "held-out.jsonl": CHATS,
    "names.json": "{}",
}


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    line: int
    language: str
    text: str
    needs: str  # what running it needs and a test does not have, or ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """Fenced blocks by their language, and indented ones by how they begin."""
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type == "fence":
            yield fenced(page, token)
        elif token.type == "code_block":
            starts = (("dspine-mlx ", "bash"), ("python -m ", "bash"), ("import ", "python"))
            language = next((to for start, to in starts if token.content.startswith(start)), "")
            yield Block(page, line_of(token), language, token.content, "")


def fenced(page: str, token: Token) -> Block:
    language, _, mark = token.info.strip().partition(" ")
    found = re.fullmatch(r'(?:needs="(.+)")?', mark)
    where = f"{page}:{line_of(token)}"
    assert found is not None, f"{where}: the fence says {mark}; it must be needs=..."
    needs = found[1] or ""
    assert needs in {"", *NEEDS}, f"{where} needs {needs!r}, none of {sorted(NEEDS)}"
    return Block(page, line_of(token), language, token.content, needs)


def line_of(token: Token) -> int:
    assert token.map is not None
    return token.map[0] + 1


def commands(block: Block) -> list[list[str]]:
    """The words of each command, placeholders filled in; comments and set variables left out."""
    text = COMMENT.sub(r"\1", block.text.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    parts = groupby(lexer, lambda word: bool(re.fullmatch(r"[&|;\n]+", word)))
    found = [[filled(word) for word in words] for separates, words in parts if not separates]
    called = (list(dropwhile(re.compile(r"[A-Z_]+=").match, words)) for words in found)
    return [words for words in called if words]


def filled(text: str) -> str:
    """The text with its placeholders filled in."""
    names = sorted(PLACEHOLDERS, key=len, reverse=True)
    pattern = rf"(?<![\w/.-])({'|'.join(map(re.escape, names))})(?![\w/.-])"
    return re.sub(pattern, lambda found: PLACEHOLDERS[found[1]], text)


def prose(page: str) -> Iterator[tuple[str, str]]:
    """Pieces of a page outside of blocks: ("code", ...), ("link", ...), ("image", ...)."""
    for token in MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8")):
        for child in token.children or []:
            if child.type == "code_inline":
                yield "code", child.content
            elif child.type == "link_open":
                yield "link", str(child.attrs["href"])
            elif child.type == "image":
                yield "image", str(child.attrs["src"])


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    tokens = MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8"))
    titles = [
        after.content
        for token, after in zip(tokens, tokens[1:], strict=False)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
