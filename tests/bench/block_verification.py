"""Tokens accepted when sampled drafts are tested as blocks, against token by token.

    python -m tests.bench.block_verification PROMPTS.txt [--temp 1] [--texts 20] [--tokens 128]

Both tests are put to the very same drafts and target rows; their expected tokens are exact.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import dspine_mlx
from dspine_mlx.round import speculate
from dspine_mlx.round.accept import TargetLogits, accept, acceptance, block_chances
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import Draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--temp", type=float, default=1.0)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--length", type=int, default=99)
    args = parser.parse_args()
    model, tokenizer, drafter = dspine_mlx.load()
    rounds: list[tuple[float, float]] = []

    def both(draft: Draft, rows: TargetLogits, sampler: Any) -> tuple[int, int]:
        draft = draft.first(len(rows.logits))
        p = sampler.probs(rows.logprobs(len(rows.logits)))
        if draft.q is not None and len(draft.tokens):
            alone = np.array(acceptance(draft, p), np.float64)
            block = np.array(block_chances(draft, p)[1], np.float64)
            fails = np.cumprod((1 - block)[::-1])[::-1]
            rounds.append((float(np.cumprod(alone).sum()), float((1 - fails).sum())))
        return accept(draft, rows, sampler)

    speculate.accept = both
    mx.random.seed(0)
    for line in args.prompts.read_text(encoding="utf-8").splitlines()[: args.texts]:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], add_generation_prompt=True
        )
        options = {"max_tokens": args.tokens, "verify_length": args.length}
        for _ in dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, sampler=Sampler(temp=args.temp), **options
        ):
            pass
    alone, block = 1 + np.array(rounds).T
    print(
        json.dumps(
            {
                "rounds": len(rounds),
                "tokens per round, token by token": round(alone.mean(), 3),
                "tokens per round, as a block": round(block.mean(), 3),
                "gain": f"{block.mean() / alone.mean() - 1:.1%}",
            }
        )
    )


if __name__ == "__main__":
    main()
