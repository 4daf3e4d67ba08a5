"""Real speed of the pair that ships, whatever costs are on file. Needs a quiet machine.

    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 MLX_DISABLE_COMPILE=1 \\
        python -m tests.bench.wrong_costs [--disturbed FILE.json] [--sweeps 5] [--dtype float32]

Whole calls, in turn: plain decoding (mlx_lm), `auto` with a clean curve on file, and `auto` in a
fresh schedule with each wrong curve on file. Medians over the sweeps of

    hard       plain decoding's time over auto's, 256 tokens of a prompt unlike the training text
    questions  the time of auto with the clean curve over auto's, 256 tokens of held-out questions
    short      plain decoding's time over auto's, 64 tokens of hard text, with the file that an
               earlier process on hard text has left
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

import dspine_mlx
from dspine_mlx.cache_folder import restored
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import DEMO, load, load_drafter
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.profile import measure
from dspine_mlx.verify_length.schedule import prepare
from tests.bench.do_no_harm import PROMPTS

HARD = [
    "zx qv 9931 jj kk ## @@ lorem ipsum dolor sit amet consectetur",
    "Once upon a time in a distant kingdom there lived an old clockmaker who",
    "SELECT name, count(*) FROM orders WHERE date > '2020-01-01' GROUP BY",
]
HARD_TOKENS, QUESTION_TOKENS, SHORT_TOKENS = 256, 64, 64


class Pair:
    """The shipped pair, with a folder of its own for the files."""

    def __init__(self, dtype: str, folder: Path):
        self.model, self.tokenizer, _ = load(DEMO / "target")
        if dtype:
            self.model.set_dtype(getattr(mx, dtype))
        self.drafter: Drafter = load_drafter(DEMO / "drafter", self.model)
        store.cache_folder = lambda: folder

    def fresh(self, curve: Curve | None) -> None:
        """As in a new process: this curve on file, without a history; None: the file as it is."""
        self.drafter.schedule = None
        if curve is not None:
            store.write_costs(self.drafter, curve, {})

    def seconds(self, prompts: list[Any], tokens: int, ours: bool) -> float:
        started = time.perf_counter()
        for prompt in prompts:
            options: dict[str, Any] = {"max_tokens": tokens}
            stream = (
                dspine_mlx.stream_generate(
                    self.model, self.tokenizer, prompt, self.drafter, **options
                )
                if ours
                else mlx_lm.stream_generate(self.model, self.tokenizer, prompt, **options)
            )
            for _ in stream:
                pass
        return time.perf_counter() - started

    def questions(self) -> list[Any]:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        return [self.tokenizer.apply_chat_template(c, add_generation_prompt=True) for c in chats]


def wrong_curves(clean: Curve, disturbed: Path | None) -> dict[str, Curve]:
    kinds = ["plain", *["verify"] * len(clean.verify[0]), "draft"]
    curves = {"clean": clean}
    if disturbed:
        data = json.loads(disturbed.read_text(encoding="utf-8"))
        curves["disturbed"] = restored(Curve, data["curve"])
    for factor in (5.0, 0.2):
        for part in ("all", "plain", "draft", "verify"):
            factors = [factor if part in ("all", kind) else 1.0 for kind in kinds]
            curves[f"{part} times {factor}"] = clean.scaled(factors)
    return curves


def ratios(pair: Pair, curves: dict[str, Curve], sweep: int) -> dict[str, tuple[float, float]]:
    """hard and questions, by the curve on file."""
    hard, questions = [HARD[sweep % len(HARD)]], pair.questions()

    def timed(curve: Curve, prompts: list[Any], tokens: int) -> float:
        pair.fresh(curve)
        prepare(pair.drafter)  # reading the file isn't timed
        return pair.seconds(prompts, tokens, ours=True)

    found = {}
    for name, curve in curves.items():
        plain = pair.seconds(hard, HARD_TOKENS, ours=False)
        right = timed(curves["clean"], questions, QUESTION_TOKENS)
        found[name] = (
            plain / timed(curve, hard, HARD_TOKENS),
            right / timed(curve, questions, QUESTION_TOKENS),
        )
    return found


def short(pair: Pair, clean: Curve, sweep: int) -> float:
    pair.fresh(clean)
    pair.seconds([HARD[(sweep + 1) % len(HARD)]], HARD_TOKENS, ours=True)  # leaves its history
    pair.fresh(None)
    prepare(pair.drafter)
    text = [HARD[sweep % len(HARD)]]
    plain = pair.seconds(text, SHORT_TOKENS, ours=False)
    return plain / pair.seconds(text, SHORT_TOKENS, ours=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disturbed", type=Path, help="a file with a `curve`")
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--dtype", default="")
    args = parser.parse_args()
    mx.disable_compile()
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(args.dtype, Path(folder))
        pair.tokenizer._eos_token_ids = set()  # every text gets its full length
        clean = measure(pair.drafter)
        if clean.contradiction():
            raise SystemExit(f"this machine is not quiet: {clean.contradiction()}")
        curves = wrong_curves(clean, args.disturbed)
        pair.seconds([HARD[0]], 32, ours=False)  # warm-up
        pair.seconds([HARD[0]], 32, ours=True)
        sweeps = [ratios(pair, curves, n) for n in range(args.sweeps)]
        shorts = [short(pair, clean, n) for n in range(4 * args.sweeps)]
    median: Callable[[list[float]], float] = statistics.median
    for name in curves:
        hard, questions = (median([s[name][i] for s in sweeps]) for i in (0, 1))
        print(f"{name:16} hard {hard:.3f} of plain, questions {questions:.3f} of auto")
    print(f"short, with a history: {median(shorts):.3f} of plain")


if __name__ == "__main__":
    main()
