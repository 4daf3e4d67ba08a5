"""Optimal stopping over the K x K table, against simpler rules for sampled drafts.

    python -m tests.bench.stopping PROMPTS.txt [--texts 8] [--temp 1]

Proposals of the demo pair are recorded; tokens are then drawn from their tables, and accepted
with the drafter's own confidence. Each rule's tokens per second is computed at its own best rate,
on the published cost curves:

    threshold  feeds row k while its own gain pays, with no look ahead
    sampled_verify_length  the package's rule: later slots have the greedy path's chances
    induction  backward induction over slot, predecessor and survival (32 values): the optimum
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import dspine_mlx
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.round.select import log_odds
from dspine_mlx.verify_length.calibration import sigmoid
from dspine_mlx.verify_length.rules import sampled_verify_length
from tests.bench.simulate import HERE, curve_of

GRID = np.exp(np.linspace(np.log(1e-4), 0, 32))


@dataclass
class Table:
    q: np.ndarray  # [M, K, K], distribution of each slot after each predecessor
    c: np.ndarray  # [M, K], chance of each slot after each predecessor


def record(path: Path, texts: int, temp: float, every: int = 4) -> list[Table]:
    """Tables at every fourth position of greedy texts."""
    model, tokenizer, drafter = dspine_mlx.load()
    assert drafter is not None
    sampler, tables = Sampler(temp=temp), []
    taps = drafter.config.target_layer_ids
    for line in path.read_text(encoding="utf-8").splitlines()[:texts]:
        messages = [{"role": "user", "content": line}]
        given = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text = [
            r.token
            for r in dspine_mlx.stream_generate(model, tokenizer, given, None, max_tokens=96)
        ]
        cache = make_prompt_cache(model)
        _, features = drafter.target.forward(mx.array([*given, *text]), cache, taps)
        draft_cache, first = drafter.make_cache(), len(given)
        for i in range(first, first + len(text), every):
            new = features[:, draft_cache[0].offset : i]
            proposal = drafter.propose([*given, *text][i], new, draft_cache).ranked()
            M, K = proposal.candidates.shape
            start = mx.broadcast_to(proposal.first, (1, K, K))
            q = sampler.draft_probs(mx.concatenate([start, proposal.transitions]))
            odds = [[log_odds(probs) for probs in rows] for rows in q.tolist()]
            tables.append(Table(np.array(q, float), sigmoid(np.clip(odds, -20, 20))))
    return tables


def values(table: Table, seconds: np.ndarray, rate: float) -> np.ndarray:
    """W [M + 1, K, 32]: what goes on to be gained from slot k on, its predecessor and the survival
    of the tokens before it known, the token of slot k not yet drawn."""
    M, K = table.c.shape
    W = np.zeros((M + 1, K, len(GRID)))
    for k in range(M - 1, -1, -1):
        for i in range(K):
            accepted = GRID * table.c[k, i]
            later = np.stack([np.interp(accepted, GRID, W[k + 1, j]) for j in range(K)])
            gain = accepted - rate * (seconds[k + 1] - seconds[k]) + later
            W[k, i] = table.q[k, i] @ np.maximum(gain, 0)
    return W


def lengths(rule: str, table: Table, path: list[int], seconds: np.ndarray, rate: float) -> int:
    before = [0, *path[:-1]]
    c = table.c[np.arange(len(path)), before]
    if rule == "sampled_verify_length":
        greedy = [0]
        for q in table.q[:-1]:
            greedy.append(int(q[greedy[-1]].argmax()))
        greedy_path = table.c[np.arange(len(path)), greedy]
        return sampled_verify_length(
            c.tolist(), greedy_path.tolist(), seconds.tolist(), [1 / rate] * len(c)
        )
    W = values(table, seconds, rate) if rule == "induction" else np.zeros((len(c) + 1, 16, 32))
    accepted = 1.0
    for k, j in enumerate(path):
        accepted *= c[k]
        later = np.interp(accepted, GRID, W[k + 1, j]) if rule == "induction" else 0.0
        if accepted + later <= rate * (seconds[k + 1] - seconds[k]):
            return k
    return len(path)


def draw(table: Table, rng: np.random.Generator) -> list[int]:
    path, i = [], 0
    for q in table.q:
        i = int(rng.choice(len(q[i]), p=q[i] / q[i].sum()))
        path.append(i)
    return path


def speed(rule: str, tables: list[Table], seconds: np.ndarray, draft: float) -> float:
    """Tokens per second at the rate that reproduces itself."""
    rate = 1 / seconds[0]
    for _ in range(4):
        rng, tokens, time = np.random.default_rng(0), 0.0, 0.0
        for table in tables:
            path = draw(table, rng)
            length = lengths(rule, table, path, seconds, rate)
            c = table.c[np.arange(len(path)), [0, *path[:-1]]]
            tokens += 1 + np.cumprod(c[:length]).sum()
            time += draft + seconds[length]
        rate = max(1 / seconds[0], tokens / time)
    return tokens / time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--temp", type=float, default=1.0)
    args = parser.parse_args()
    tables = record(args.prompts, args.texts, args.temp)
    print(len(tables), "proposals; tokens per second over plain decoding's")
    for entry in json.loads((HERE / "curves.json").read_text(encoding="utf-8")):
        curve = curve_of(entry, tables[0].c.shape[0])
        seconds = np.array(curve.verify[0])
        speeds = {
            rule: curve.plain[0] * speed(rule, tables, seconds, curve.draft[0])
            for rule in ("threshold", "sampled_verify_length", "induction")
        }
        print(
            f"{entry['name']:40}", " ".join(f"{r} {s:.3f}" for r, s in speeds.items()), flush=True
        )


if __name__ == "__main__":
    main()
