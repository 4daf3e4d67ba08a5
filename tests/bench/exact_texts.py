"""Texts of plain decoding, and drafted ones that must equal them.

What `tests.bench.exactness` counts. The targets are those of tests/support/families.py, with new
random weights in every turn, and the pair that ships.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

import dspine_mlx
from dspine_mlx.batch.target_rows import refusal
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.load import DEMO
from dspine_mlx.round.lookup import Copy, CopyChances, Lookup
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.select import Draft
from dspine_mlx.target.model import Target
from dspine_mlx.target.prompt_cache import PromptCaches
from dspine_mlx.target.rollback import leaves
from dspine_mlx.verify_length.costs import Costs, Curve
from dspine_mlx.verify_length.schedule import Schedule
from tests.support import families
from tests.support.drafters import EVERY
from tests.support.samplers import PROCESSORS, SAMPLERS
from tests.support.texts import scripted_texts
from tests.support.tiny import SCRIPTS, random_prompt

TOKENS = 96  # of a text
AHEAD = 32  # tokens that a script knows beyond a text that is closed early
WINDOW = 512  # of windows and limited caches, which no text fills
# One row and several round differently here (docs/exactness.md), so nothing is claimed of these.
ROUNDED = {"kimi_linear", "nemotron_h", "falcon_h1", "granitemoehybrid", "mamba2"}
SHIPPED = "the pair that ships"
FOUR_BITS = [f"{name}, 4 bits" for name in ("qwen3", "qwen3_moe", "qwen3_5", "lfm2")]
FAMILIES = [*(n for n in families.FAMILIES if n not in ROUNDED), *FOUR_BITS, SHIPPED]
GROUP = 32  # numbers that share a scale in quantised caches
QUANTISABLE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
GREEDY = ("greedy", "greedy, processors")
SAMPLING = [*GREEDY, *SAMPLERS, "seeded, processors", "mlx-lm's sampler"]
LENGTHS = ("one", "several", "auto", "any")
Pair = tuple[list[int], list[int]]  # our tokens, and plain decoding's


@dataclass
class AnyLength(Fixed):
    """A policy that does as it likes: any length of drafts and copies, parked or not."""

    rng: random.Random = field(default_factory=random.Random)
    copies: CopyChances | None = field(default_factory=CopyChances)

    def start_text(self, *_: Any) -> None: ...

    def choose(
        self, draft: Draft, lookup: Lookup | None, limit: int, depth: int, seconds: float
    ) -> tuple[Copy | None, int]:
        return None, self.rng.randint(0, min(limit, len(draft.tokens)))

    def learn(self, accepted: int, offered: int) -> None:
        self.parked = self.rng.random() < 0.1

    def probe_due(self, depth: int) -> bool:
        return self.rng.random() < 0.2

    def plain_token(self, *_: Any) -> None:
        self.parked = self.rng.random() < 0.7


def free(rows: int) -> Curve:
    """Costs by which drafts and verify rows are free; real steps soon correct them."""
    seconds = (1e-3,) * rows
    pairs = (1e-3, 1e-3), (1e-4, 1e-4)
    return Curve((64, 2048), *pairs, (seconds, seconds), measured=False)


def wider(config: dict[str, Any]) -> dict[str, Any]:
    nested = {name: wider(value) for name, value in config.items() if isinstance(value, dict)}
    windows = config.keys() & {"sliding_window", "attention_window_size"}
    return config | nested | dict.fromkeys(windows, WINDOW)


@cache
def shipped() -> tuple[nn.Module, TokenizerWrapper, Drafter]:
    model, wrapper, drafter = dspine_mlx.load(str(DEMO / "target"), str(DEMO / "drafter"))
    assert drafter is not None
    return model, wrapper, drafter


def target(family: str, caches: str, seed: int) -> nn.Module:
    if family == SHIPPED:
        return shipped()[0]
    name, _, bits = family.partition(",")
    changes = wider(families.FAMILIES[name]) | (QUANTISABLE if caches == "quantised" else {})
    return families.build(name, 4 if bits else None, seed, **changes)


@cache
def raw_tokenizer() -> Any:
    return load_tokenizer(DEMO / "target")._tokenizer


@cache
def tokenizer(end: int = -1) -> TokenizerWrapper:
    """The shipped pair's, whose texts end with this token only."""
    wrapper = TokenizerWrapper(raw_tokenizer())
    wrapper.eos_token_ids = {end}
    return wrapper


@dataclass
class Turn:
    """What one text of a cell is made with. The weights, prompts and settings are drawn from rng,
    and drafted texts draw from it, too."""

    family: str
    caches: str
    sampling: str
    rng: random.Random

    def __post_init__(self) -> None:
        rng = self.rng
        self.model = target(self.family, self.caches, rng.randrange(1 << 16))
        self.seed = rng.randrange(1 << 32)
        self.settings = SAMPLERS[
            self.sampling if self.sampling in SAMPLERS else rng.choice([*SAMPLERS])
        ]
        processors = PROCESSORS[rng.choice([*PROCESSORS][1:])]
        self.processors = processors if "processors" in self.sampling else {}

    def prompt(self, longest: int = 60) -> list[int]:
        return random_prompt(self.rng.randint(1, longest), self.rng.randrange(1 << 16))

    def options(self) -> dict[str, Any]:
        """The sampler and processors; the random state is as at every text's start."""
        mx.random.seed(self.seed)
        sampler: Any = None
        if self.sampling == "mlx-lm's sampler":
            sampler = make_sampler(**self.settings)
        elif self.sampling not in GREEDY:
            sampler = dspine_mlx.Sampler(**self.settings, seeded=True)
        return {"sampler": sampler, "logits_processors": make_logits_processors(**self.processors)}

    def end(self, tokens: list[int]) -> int:
        """The token that ends drafted texts: now and then one of these, or none."""
        return self.rng.choice(tokens) if self.rng.random() < 0.2 else -1

    def plain(self, prompt: list[int], **options: Any) -> list[int]:
        options = {"max_tokens": TOKENS} | options | self.options()
        responses = mlx_lm.stream_generate(self.model, tokenizer(), prompt, **options)
        return [r.token for r in responses]

    def drafted(
        self, prompt: list[int], drafter: Drafter, length: Any, plain: list[int], **options: Any
    ) -> Pair:
        """A drafted text, which now and then one of its tokens ends, and the one wanted."""
        end = self.end(plain)
        wanted = plain[: plain.index(end) + 1] if end in plain else plain
        options |= {"verify_length": length, "max_tokens": len(plain)} | self.options()
        responses = dspine_mlx.stream_generate(
            self.model, tokenizer(end), prompt, drafter, **options
        )
        return list(tokens_of(responses)), wanted

    def closed(
        self, prompt: list[int], drafter: Drafter, length: Any, wanted: list[int], **options: Any
    ) -> Pair:
        """A drafted text whose generator is closed after the tokens wanted."""
        options |= {"verify_length": length, "max_tokens": TOKENS} | self.options()
        responses = dspine_mlx.stream_generate(self.model, tokenizer(), prompt, drafter, **options)
        ours = list(itertools.islice(tokens_of(responses), len(wanted)))
        responses.close()
        return ours, wanted

    def drafter(self, kind: str, *texts: list[int]) -> Drafter:
        """A drafter of the kind. A script knows the texts."""
        changes = {"block_size": self.rng.choice((4, 8, 8, 16))}
        if kind == SHIPPED:
            drafter = shipped()[2]
        elif kind in EVERY:
            size = Target(self.model).hidden_size
            drafter = EVERY[kind](
                self.model, seed=self.rng.randrange(1 << 16), hidden_size=size, **changes
            )
        elif len(texts) > 1:
            config = families.drafter_config(self.model, **changes)
            drafter = scripted_texts(self.model, list(texts), kind, config)
            drafter.whole_context = False
        else:
            drafter = families.scripted_drafter(self.model, texts[0], kind, **changes)
            drafter.whole_context = False
        drafter.schedule = Schedule(Costs(free(drafter.config.num_proposals + 1)), {})
        return drafter

    def length(self, kind: str) -> Any:
        drawn = {"one": 1, "several": self.rng.randint(2, 15), "auto": "auto"}
        return drawn.get(kind) or AnyLength(0, rng=self.rng)


def tokens_of(responses: Iterable[dspine_mlx.GenerationResponse]) -> Iterator[int]:
    return (response.token for response in responses)


Compare = Callable[[str, str], Iterator[Pair]]  # a drafter and a length -> texts to compare


def alone(turn: Turn, **options: Any) -> Compare:
    """One text, in caches of its own."""
    prompt = turn.prompt()
    plain = turn.plain(prompt, **options)

    def compare(drafter: str, length: str) -> Iterator[Pair]:
        bound = turn.drafter(drafter, prompt + plain)
        yield turn.drafted(prompt, bound, turn.length(length), plain, **options)

    return compare


def limited(turn: Turn) -> Compare:
    return alone(turn, max_kv_size=WINDOW)


def quantised(turn: Turn) -> Compare:
    rng = turn.rng
    start = rng.choice((0, rng.randint(1, TOKENS)))
    return alone(turn, kv_bits=rng.choice((4, 8)), kv_group_size=GROUP, quantized_kv_start=start)


def continued(turn: Turn) -> Compare:
    """A second turn in the cache that a closed generator left. Processors see its tokens only."""
    prompt, more = turn.prompt(), turn.prompt(20)
    first = turn.plain(prompt, max_tokens=TOKENS // 2 + AHEAD)
    said, plain_caches = first[: turn.rng.randint(1, TOKENS // 2)], make_prompt_cache(turn.model)
    turn.plain(prompt, max_tokens=len(said), prompt_cache=plain_caches)
    second = turn.plain(more, max_tokens=TOKENS // 2, prompt_cache=plain_caches)

    def compare(drafter: str, length: str) -> Iterator[Pair]:
        caches = make_prompt_cache(turn.model)
        bound = turn.drafter(drafter, prompt + first)
        yield turn.closed(prompt, bound, turn.length(length), said, prompt_cache=caches)
        bound = turn.drafter(drafter, prompt + said + more + second)
        yield turn.drafted(more, bound, turn.length(length), second, prompt_cache=caches)

    return compare


def fetched(turn: Turn) -> Compare:
    """A conversation that parts from an earlier one, with what can be reused of its caches."""
    system, ends = turn.prompt(30), frozenset({2})
    prompts = [[*system, 2, *turn.prompt(30), 2, *turn.prompt(4)] for _ in range(2)]

    @cache
    def plain(index: int, reused: int) -> list[int]:
        caches, prompt = make_prompt_cache(turn.model), prompts[index]
        if reused:
            turn.model(mx.array([prompt[:reused]]), cache=caches)
            mx.eval([c.state for c in caches])
        return turn.plain(prompt[reused:], max_tokens=TOKENS // 2, prompt_cache=caches)

    def compare(drafter: str, length: str) -> Iterator[Pair]:
        caches = PromptCaches(8)
        for index, prompt in enumerate(prompts):
            own, rest = caches.fetch_nearest_cache("pair", prompt)
            own = own or make_prompt_cache(turn.model)
            wanted = plain(index, len(prompt) - len(rest))
            places = caches.checkpoints("pair", prompt, rest, ends)
            bound, kept = turn.drafter(drafter, prompt + wanted), turn.length(length)
            pair = turn.drafted(
                rest, bound, kept, wanted, prompt_cache=own, prompt_checkpoints=places
            )
            caches.insert_cache("pair", prompt + pair[0], own)
            yield pair

    return compare


def batched(turn: Turn) -> Compare:
    """Texts that are decoded together, some of which wait at first."""
    prompts = [turn.prompt(30) for _ in range(6)]
    texts = [turn.plain(prompt, max_tokens=turn.rng.randint(16, TOKENS // 2)) for prompt in prompts]

    def compare(drafter: str, length: str) -> Iterator[Pair]:
        pairs = zip(prompts, texts, strict=True)
        bound = turn.drafter(drafter, *(prompt + text for prompt, text in pairs))
        end, own = turn.end(sum(texts, [])), turn.options()
        ours = dspine_mlx.batch_generate(
            turn.model, tokenizer(end), prompts, bound,
            sampler=own["sampler"], logits_processors=own["logits_processors"],
            seeds=[turn.seed] * len(prompts), max_tokens=[len(text) for text in texts],
            verify_length=turn.length(length), completion_batch_size=turn.rng.randint(2, 6),
            return_token_ids=True,
        )  # fmt: skip
        wanted = [text[: text.index(end)] if end in text else text for text in texts]
        yield from zip(ours.token_ids, wanted, strict=True)

    return compare


CACHES: dict[str, Callable[[Turn], Compare]] = {
    "its own": alone,
    "limited": limited,
    "quantised": quantised,
    "continued": continued,
    "fetched": fetched,
    "a batch's": batched,
}


@cache
def possible(family: str, caches: str) -> bool:
    """Whether texts of the family can be made so at all."""
    model = target(family, caches, 0)
    own = make_prompt_cache(model)
    kinds = {type(c) for c in leaves(own)}
    if caches == "limited":
        return not hasattr(model, "make_cache")
    if caches == "quantised":
        return KVCache in kinds and kinds <= {KVCache, ArraysCache} and quantisable(model, own)
    return caches != "a batch's" or refusal(model, own) is None


def quantisable(model: nn.Module, own: list[Any]) -> bool:
    """Whether MLX can quantise what the caches hold: not if heads are narrower than a group."""
    model(mx.array([[1]]), cache=own)
    held = [x for c in leaves(own) if type(c) is KVCache for x in (c.keys, c.values)]
    return not any(x.shape[-1] % GROUP for x in held if x is not None)


def drafters(family: str) -> list[str]:
    return [*SCRIPTS, *EVERY] + [SHIPPED] * (family == SHIPPED)
