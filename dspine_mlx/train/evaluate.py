"""Evaluating a drafter on held-out prompts: real decoding, teacher forcing, prompt lookup."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.generate import stream_generate
from dspine_mlx.load import load
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.train.batches import assemble, draw_blocks
from dspine_mlx.train.config import LossConfig
from dspine_mlx.train.data import Problems, Sequence, prompt_tokens, read_chats
from dspine_mlx.train.features import observe
from dspine_mlx.train.losses import Schedule
from dspine_mlx.train.step import drafter_loss

STILL = Schedule(mx.array(1.0), mx.array(0.0), mx.array(1.0))  # losses are not used here


@dataclass(frozen=True)
class Decoded:
    """One prompt's text and the target calls it took after the prompt."""

    prompt: list[int]
    tokens: list[int]
    accepted: int
    rounds: int


def decode(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    drafter: Drafter,
    prompts: list[list[int]],
    temperature: float,
    *,
    max_tokens: int = 256,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Decoded]:
    """Decode every prompt as users do, with all slots offered in every round."""
    texts = []
    for done, prompt in enumerate(prompts, 1):
        responses = list(
            stream_generate(
                model,
                tokenizer,
                prompt,
                drafter,
                max_tokens=max_tokens,
                sampler=Sampler(temp=temperature),
                verify_length=drafter.config.num_proposals,
            )
        )
        statistics = responses[-1].statistics
        tokens = [r.token for r in responses]
        texts.append(Decoded(prompt, tokens, statistics.accepted, statistics.rounds))
        progress(done, len(prompts))
    return texts


def acceptance(texts: list[Decoded], seed: int = 0) -> tuple[float, float, float]:
    """Tokens per round over all prompts, the target's own included, with a 95 % interval from a
    bootstrap over prompts."""
    counts = np.array([(t.accepted, t.rounds) for t in texts if t.rounds], float)
    if not len(counts):
        return 1.0, 1.0, 1.0
    picks = np.random.default_rng(seed).integers(0, len(counts), (2000, len(counts)))
    sums = counts[picks].sum(axis=1)
    low, high = np.quantile(1 + sums[:, 0] / sums[:, 1], (0.025, 0.975))
    accepted, rounds = counts.sum(axis=0)
    return float(1 + accepted / rounds), float(low), float(high)


def lookup_length(texts: list[Decoded], draft: int, ngram: int = 4) -> float:
    """Tokens per target call that prompt lookup would reach on the same texts.

    It finds the latest earlier occurrence of the last `ngram` tokens (or fewer, down to 1), and
    drafts up to `draft` tokens from after it. Those that equal the text's are accepted.
    """
    calls = tokens = 0
    for text in texts:
        whole = text.prompt + text.tokens
        position = len(text.prompt) + 1  # the first token comes with the prompt's own forward
        while position < len(whole):
            guess = look_up(whole[:position], draft, ngram)
            kept = 0
            while kept < len(guess) and guess[kept] == whole[position + kept]:
                kept += 1
                if position + kept == len(whole):
                    break
            step = min(kept + 1, len(whole) - position)
            calls, tokens, position = calls + 1, tokens + step, position + step
    return tokens / calls if calls else 1.0


def look_up(seen: list[int], draft: int, ngram: int) -> list[int]:
    for n in range(min(ngram, len(seen) - 1), 0, -1):
        tail = seen[-n:]
        for start in range(len(seen) - n - 1, -1, -1):
            if seen[start : start + n] == tail:
                return seen[start + n : start + n + draft]
    return []


def teacher_forced(
    drafter: Drafter, texts: list[Decoded], loss: LossConfig
) -> tuple[list[float], list[float]]:
    """Each slot's chance of acceptance given that those before it are accepted, greedy and sampled.
    It is measured at every token of the texts, which serve as the true predecessors."""
    M = drafter.config.num_proposals
    source = observe(drafter.target, drafter.config.target_layer_ids)
    reached, accepted = np.zeros((2, M)), np.zeros((2, M))
    for text in texts:
        tokens = np.array(text.prompt + text.tokens, np.int32)
        blocks = draw_blocks(Sequence(0, tokens, len(text.prompt)), len(tokens), 0.0, seed=0)
        batch = assemble([blocks], source, np.ones(M, np.float32))
        _, rows = drafter_loss(drafter, batch, STILL, loss)
        inside = np.array(batch.weights[0])
        for kind, chances in enumerate((rows.agree, rows.overlap)):
            chance = np.array(chances[0].astype(mx.float32)) * inside
            before = np.cumprod(chance, axis=-1)
            before = np.concatenate([np.ones((len(before), 1)), before[:, :-1]], axis=1) * inside
            reached[kind] += before.sum(axis=0)
            accepted[kind] += (before * chance).sum(axis=0)
    greedy, sampled = (accepted / np.maximum(reached, 1e-9)).tolist()
    return greedy, sampled


def measure(
    model: str | None,
    draft_model: str | None,
    data: Path,
    count: int,
    max_tokens: int,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Evaluate greedily and at temperature 1 on the first prompts of data; see `dspine-mlx train
    eval`."""
    problems = Problems(data)
    chats = [chat for chat in read_chats(problems) if len(chat.messages) > 1][:count]
    if not chats:
        raise InputError(f"{data} has no prompt to decode")
    target, tokenizer, drafter = load(model, draft_model)
    if drafter is None:
        raise InputError("name the drafter to judge with --draft-model")
    prompts = [prompt_tokens(chat.messages[:-1], tokenizer) for chat in chats]
    report: dict[str, Any] = {"prompts": len(prompts)}
    for kind, (name, temperature) in enumerate((("greedy", 0.0), ("sampled", 1.0))):
        mx.random.seed(seed)
        texts = decode(
            target,
            tokenizer,
            drafter,
            prompts,
            temperature,
            max_tokens=max_tokens,
            progress=partial(progress, name),
        )
        length, low, high = acceptance(texts)
        report[name] = {
            "acceptance_length": length,
            "interval": [low, high],
            "prompt_lookup": lookup_length(texts, drafter.config.num_proposals),
            "slots": teacher_forced(drafter, texts, LossConfig())[kind],
        }
    return report
