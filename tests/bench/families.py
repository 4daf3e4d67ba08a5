"""Writes the measured parts of docs/notes/families.md: `python -m tests.bench.families`.

Every family of tests/support/families.py is run through rounds of random lengths and acceptance; a
round's memory and the replay's share of it are measured on a scaled Qwen3.5.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from dspine_mlx.target.recurrent import Call
from dspine_mlx.target.rollback import Rollback, leaves
from tests.support.families import FAMILIES, build

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "families.md"
MODELS = {
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3 MoE",
    "llama": "Llama, Mistral",
    "llama_sliding": "Llama with sliding windows",
    "olmo3": "OLMo 3",
    "gemma3_text": "Gemma 3 text",
    "gemma3": "Gemma 3, language part",
    "gemma4_text": "Gemma 4 text",
    "gemma4": "Gemma 4, language part",
    "gpt_oss": "gpt-oss",
    "llama4": "Llama 4, language part",
    "qwen3_5": "Qwen3.5, 3.6, 3.8 text",
    "qwen3_5_wrapped": "Qwen3.5, 3.6, 3.8, language part",
    "qwen3_5_moe": "Qwen3.5, 3.6, 3.8 MoE",
    "qwen3_next": "Qwen3-Next",
    "olmo_hybrid": "OLMo hybrid",
    "kimi_linear": "Kimi Linear",
    "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1",
    "granitemoehybrid": "Granite 4 hybrid",
    "mamba2": "Mamba-2",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 MoE",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv7": "RWKV-7",
    "jamba": "Jamba",
}
CONTEXT, LENGTH = 10, 100
RECURRENCE = {"gated_delta_update": "gated delta", "ssm_update": "Mamba-2"}


def rollback_kind(rollback: Rollback) -> str:
    """How the caches went back, after one verify forward."""
    kinds = []
    for cache in leaves(rollback.cache):
        if type(cache) is not ArraysCache:
            kinds.append("slice" if type(cache) is RotatingKVCache else "trim")
    for mark in rollback.recurrent:
        if not mark.record.complete:
            kinds.append("second forward")
            continue
        calls = [s for s in mark.record.slots if isinstance(s, Call)]
        names = [RECURRENCE[call.function.__name__] for call in calls]
        kinds.append(f"replay ({' + '.join([*names, 'convolution'])})")
    return ", ".join(dict.fromkeys(kinds))


def deviation(model: nn.Module, seed: int) -> tuple[float, str]:
    """Largest difference of any accepted row to plain decoding, by the largest logit."""
    rng = random.Random(seed)
    tokens = mx.random.randint(0, 2048, (LENGTH,), key=mx.random.key(seed))
    junk = (tokens + 1) % 2048
    plain_cache, cache = make_prompt_cache(model), make_prompt_cache(model)
    plain = mx.concatenate([model(t[None, None], cache=plain_cache)[0] for t in tokens])
    model(tokens[None, :CONTEXT], cache=cache)
    rollback = Rollback(cache, model)
    done, worst, kind = CONTEXT, 0.0, ""
    while done < LENGTH:
        rows = min(rng.randint(2, 16), LENGTH - done)
        kept = rng.randint(1, rows)
        fed = mx.concatenate([tokens[done : done + kept], junk[done + kept : done + rows]])
        with rollback.verifying(fed):
            ours = model(fed[None], cache=cache)[0, :kept]
        kind = kind if rows == 1 else rollback_kind(rollback)
        rollback.accept(kept)
        rollback.checkpoint()
        worst = max(worst, mx.abs(ours - plain[done : done + kept]).max().item())
        done += kept
    return worst / mx.abs(plain).max().item(), kind


def table() -> str:
    lines = [
        "| mlx-lm model | models | caches | rollback | float32 | 4-bit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family, models in MODELS.items():
        cells = []
        for bits in (None, 4):
            model = build(family, bits)
            worst, kind = max(deviation(model, seed) for seed in range(2))
            cells.append("bit-equal" if worst == 0 else f"{worst:.0e}")
        names = dict.fromkeys(type(c).__name__ for c in leaves(make_prompt_cache(model)))
        name = FAMILIES[family].get("model_type", family)
        lines.append(f"| {name} | {models} | {', '.join(names)} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaled() -> nn.Module:
    """Qwen3.5 with a tenth of the 27B's width and its proportions."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "linear_num_value_heads": 12,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "full_attention_interval": 4,
    }
    return build("qwen3_5", 4, **sizes)


def unique_bytes(arrays: list[mx.array]) -> int:
    return sum({id(a): a.nbytes for a in arrays}.values())


def memory(model: nn.Module) -> str:
    lines = [
        "| rows | kept for the replay, MB | in use after the forward, MB | a state per row, MB |",
        "| --- | --- | --- | --- |",
    ]
    tokens = mx.random.randint(0, 2048, (64,))
    for rows in (2, 4, 8, 16):
        cache = make_prompt_cache(model)
        model(tokens[None], cache=cache)
        mx.eval([c.state for c in cache])
        rollback = Rollback(cache, model)
        mx.clear_cache()
        before = mx.get_active_memory()
        with rollback.verifying(tokens[:rows]):
            logits = model(tokens[None, :rows], cache=cache)
        mx.eval(logits, [c.state for c in cache])
        in_use = mx.get_active_memory() - before - logits.nbytes
        kept: list[Any] = []
        for mark in rollback.recurrent:
            kept += mark.record.convolutions
            for call in mark.record.calls:
                kept += [v for n, v in call.arguments.items() if n in call.per_token]
        total = unique_bytes([a for a in kept if a is not None])
        states = rows * unique_bytes([m.before[1] for m in rollback.recurrent])
        lines.append(f"| {rows} | {total / 1e6:.2f} | {in_use / 1e6:.2f} | {states / 1e6:.1f} |")
        del logits, rollback, cache, mark, call, kept
    return "\n".join(lines)


def replay_share(model: nn.Module) -> str:
    """Median milliseconds of processor time of a verify forward and of the replay after it."""
    lines = ["| rows | accepted | forward, ms | replay, ms |", "| --- | --- | --- | --- |"]
    tokens = mx.random.randint(0, 2048, (64,))
    for rows, kept in ((4, 2), (8, 4), (16, 4), (16, 12), (16, 16)):
        times: tuple[list[float], list[float]] = [], []
        cache = make_prompt_cache(model)
        model(tokens[None], cache=cache)
        mx.eval([c.state for c in cache])
        rollback = Rollback(cache, model)
        for _ in range(9):
            rollback.checkpoint()
            start = time.process_time()
            with rollback.verifying(tokens[:rows]):
                logits = model(tokens[None, :rows], cache=cache)
            mx.eval(logits, [c.state for c in cache])
            middle = time.process_time()
            rollback.accept(kept)
            mx.eval([c.state for c in cache])
            for kind, seconds in zip(
                times, (middle - start, time.process_time() - middle), strict=True
            ):
                kind.append(1e3 * seconds)
            rollback.accept(0)
        forward, replay = (statistics.median(kind) for kind in times)
        lines.append(f"| {rows} | {kept} | {forward:.1f} | {replay:.1f} |")
    return "\n".join(lines)


def write(name: str, text: str) -> None:
    """Put a table between its marks in the page."""
    start, end = f"<!-- {name}: measured -->", f"<!-- {name}: end -->"
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(start)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")
    print(text, end="\n\n")


def main() -> None:
    mx.disable_compile()
    model = scaled()
    write("memory", memory(model))
    write("replay", replay_share(model))
    write("families", table())


if __name__ == "__main__":
    main()
