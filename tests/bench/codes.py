"""What fewer bits for DSpine's codes cost: scores, choices, and acceptance on the shipped pair.

python -m tests.bench.codes [--target DIR --drafter DIR]
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import dspine_mlx
from dspine_mlx.convert.conversion import convert
from dspine_mlx.drafters.proposal import Proposal
from dspine_mlx.load import DEMO, load_drafter
from dspine_mlx.target.model import Target

PROMPTS = [
    "Tom has 4 apples and buys 3 more. How many apples does he have?",
    "Ali has 52 caps. He gives 17 of them to a friend. How many are left?",
    "A box holds 6 eggs. How many eggs are in 7 boxes?",
    "Mia reads 12 pages a day. How many pages does she read in 9 days?",
    "There are 45 sheep and 3 fields. How many sheep are in each field?",
    "A train has 8 cars with 20 seats each. How many seats are there?",
]


def common_rows(a: Proposal, b: Proposal) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each slot's scores of two proposals, for the predecessors and candidates that both have."""
    both = [
        np.intersect1d(x, y, return_indices=True)[1:]
        for x, y in zip(np.array(a.candidates), np.array(b.candidates), strict=True)
    ]
    for t in range(1, len(both)):
        (rows_a, rows_b), (columns_a, columns_b) = both[t - 1], both[t]
        x, y = np.array(a.transitions[t - 1]), np.array(b.transitions[t - 1])
        yield x[rows_a][:, columns_a], y[rows_b][:, columns_b]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--drafter", type=Path, default=DEMO / "drafter")
    args = parser.parse_args()
    model, tokenizer, _ = dspine_mlx.load(args.target)
    model.set_dtype(mx.float32)  # nothing but the codes may differ
    exact = load_drafter(args.drafter, model)
    target, rng = Target(model), np.random.default_rng(0)
    tokens = mx.array(tokenizer.encode(" ".join(PROMPTS)))
    _, features = target.forward(tokens, make_prompt_cache(model), exact.config.target_layer_ids)
    anchors = rng.integers(5, tokens.size, size=40)
    with tempfile.TemporaryDirectory() as work:
        for bits in ("none", 8, 4):
            out = Path(work) / str(bits)
            convert(args.drafter, out, codes_bits=bits)
            drafter = load_drafter(out, model)
            gaps: list[float] = []
            changed = rows = 0
            for n in anchors.tolist():
                a, b = (
                    d.propose(tokens[n], features[:, :n], d.make_cache()).ranked()
                    for d in (exact, drafter)
                )
                for x, y in common_rows(a, b):
                    gaps.append(float(np.abs(x - y).max()))
                    changed += int((x.argmax(-1) != y.argmax(-1)).sum())
                    rows += len(x)
            lengths = []
            for question in PROMPTS:
                message = {"role": "user", "content": question}
                prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
                responses = list(
                    dspine_mlx.stream_generate(
                        model, tokenizer, prompt, drafter, max_tokens=80,
                        verify_length=drafter.config.num_proposals,
                    )
                )  # fmt: skip
                lengths.append(responses[-1].acceptance_length)
            figures = {
                "codes_bits": bits,
                "largest_score_difference": round(max(gaps), 4),
                "median_over_slots": round(float(np.median(gaps)), 4),
                "rows_with_another_best": f"{changed} of {rows}",
                "acceptance_length": round(float(np.mean(lengths)), 3),
            }
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
