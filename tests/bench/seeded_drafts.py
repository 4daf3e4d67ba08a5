"""Tokens per round of seeded text: drafts that foresee the draw, against the drafter's best tokens,
and against sampled drafts tested as blocks (which draw another text).

    python -m tests.bench.seeded_drafts QUESTIONS.jsonl [--temps 0.6 1] [--texts 200] [--tokens 160]

Every text has a seed of its own, the same each way, and all proposals are offered in every round.
float16 becomes float32, as CPUs have no fast half precision. Intervals (95 %) are a bootstrap over
the texts.
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.drafters.drafter import Drafter

Counts = np.ndarray  # [texts, 2]: tokens of rounds, rounds


def count(
    pair: tuple[nn.Module, TokenizerWrapper, Drafter],
    prompts: list[list[int]],
    sampler: dspine_mlx.Sampler,
    foreseen: bool,
    max_tokens: int,
) -> tuple[list[list[int]], Counts]:
    texts, counts = [], []
    for seed, prompt in enumerate(prompts):
        mx.random.seed(seed)
        responses = list(
            dspine_mlx.stream_generate(
                *pair[:2],
                prompt,
                pair[2],
                max_tokens=max_tokens,
                sampler=sampler if foreseen else sampler.function,
                verify_length=pair[2].config.num_proposals,
            )
        )
        statistics = responses[-1].statistics
        texts.append([r.token for r in responses])
        counts.append([statistics.round_tokens, statistics.rounds])
    return texts, np.array(counts)


def ratio(counts: Counts) -> float:
    tokens, rounds = counts.sum(axis=0)
    return float(tokens / rounds)


def interval(counts: Counts, base: Counts | None = None) -> list[float]:
    """Of tokens per round, or of their difference to another way's, text by text."""
    rng, values = np.random.default_rng(0), []
    for _ in range(2000):
        drawn = rng.integers(0, len(counts), len(counts))
        values.append(ratio(counts[drawn]) - (0 if base is None else ratio(base[drawn])))
    return [round(float(v), 3) for v in np.quantile(values, (0.025, 0.975))]


def wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype == mx.float16 else array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    model, tokenizer, drafter = dspine_mlx.load(args.model, args.draft_model)
    assert drafter is not None
    model.update(tree_map(wide, model.parameters()))
    drafter.set_dtype(mx.float32)
    lines = args.questions.read_text(encoding="utf-8").splitlines()[: args.texts]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True
        )
        for line in lines
    ]
    for temp in args.temps:
        pair, found = (model, tokenizer, drafter), {}
        plain = dspine_mlx.Sampler(temp=temp)
        seeded = dspine_mlx.Sampler(temp=temp, seeded=True)
        texts, found["one-hot"] = count(pair, prompts, seeded, False, args.tokens)
        same, found["foreseen"] = count(pair, prompts, seeded, True, args.tokens)
        found["sampled"] = count(pair, prompts, plain, True, args.tokens)[1]
        report = {"temperature": temp, "same text": sum(map(list.__eq__, texts, same))}
        for mode, counts in found.items():
            report[mode] = [round(ratio(counts), 3), interval(counts)]
        report["foreseen - one-hot"] = interval(found["foreseen"], found["one-hot"])
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
