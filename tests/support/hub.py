"""A Hub cache of our own, and a registry that names what is in it."""

import json
import shutil
from pathlib import Path
from typing import Any

from dspine_mlx.load import DEMO
from dspine_mlx.models.registry import OWN

REVISION = "0123456789abcdef0123456789abcdef01234567"
TARGET, DRAFTER = "toy/Word-Problems-4bit", "toy/word-problems-drafter"


def cache_model(cache: Path, name: str, source: Path, revision: str = REVISION) -> Path:
    """A model as a download leaves it; its snapshot."""
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(revision)
    shutil.copytree(source, home / "snapshots" / revision)
    return home / "snapshots" / revision


def demo_cache(cache: Path) -> Path:
    """The pair that ships, as if downloaded."""
    cache_model(cache, TARGET, DEMO / "target")
    cache_model(cache, DRAFTER, DEMO / "drafter")
    return cache


def entry(**changes: Any) -> dict[str, Any]:
    """An entry for the demo drafter."""
    return {
        "id": DRAFTER,
        "targets": ["toy/Word-Problems"],
        "method": "dspine",
        "block": 16,
        "sources": ["https://example.org/drafter"],
    } | changes


def own_registry(home: Path, *entries: dict[str, Any]) -> Path:
    path = home / OWN
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"drafters": entries}))
    return path
