"""Templated word problems from the PyPI package reasoning-gym (Apache-2.0).

`pip install --no-deps reasoning-gym` is enough: only its GSM-symbolic generators are loaded,
without the package's own dependencies.
"""

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

DRAWS = 1000  # draws before a template counts as exhausted
UNUSABLE = {
    32,
    35,
    37,
    61,
    63,
    65,
    74,
    76,
    77,
    79,
    86,
    87,
    90,
    97,
    98,
}  # according to the package itself


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def templates() -> list[Callable[..., dict]]:
    """The 85 usable problem generators, each called with (random.Random, difficulty)."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("reasoning-gym is not installed: pip install --no-deps reasoning-gym")
    root = Path(spec.submodule_search_locations[0])
    package = ModuleType("reasoning_gym")
    package.__path__ = [str(root)]
    sys.modules["reasoning_gym"] = package
    load("reasoning_gym.utils", root / "utils.py")
    folder = root / "arithmetic" / "gsm_symbolic"
    modules = [load(n, folder / f"{n}.py") for n in ("generators_00_49", "generators_50_99")]
    names = [f"generate_{i}" for i in range(100) if i not in UNUSABLE]
    return [vars(m)[name] for name in names for m in modules if name in vars(m)]


def questions(count: int, seed: int, chosen: Sequence[int] = ()) -> Iterator[str]:
    """Yield distinct questions, from all templates in turn, or from the chosen ones.

    ValueError when a template has no more: some have only a few hundred.
    """
    rng, makers = random.Random(seed), templates()
    makers = [makers[i] for i in chosen] or makers
    seen: set[str] = set()
    for n in range(count):
        maker = makers[n % len(makers)]
        drawn = (maker(rng, 1.0)["question"] for _ in range(DRAWS))
        question = next((text for text in drawn if text not in seen), None)
        if question is None:
            raise ValueError(f"{maker.__name__} has no {n // len(makers) + 1} distinct questions")
        seen.add(question)
        yield question


def write_questions(
    path: Path, count: int, seed: int, excluded: set[str], chosen: Sequence[int] = ()
) -> set[str]:
    """Write one chat per line, its answer still empty; returns the questions."""
    texts = [text for text in questions(count, seed, chosen) if text not in excluded]
    if not path.exists():
        rows = [{"prompt": text, "completion": ""} for text in texts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return set(texts)
