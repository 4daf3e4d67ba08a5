"""python -m tests.support.group_texts JOB.json: texts of one or more targets in a group.

Rank 0 decodes every case plainly by mlx-lm's own means, and with a drafter, and writes the tokens;
the others write what they followed. The drafter is right now and then, or of the kind that the case
names, with random weights.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.sample_utils import make_logits_processors

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.lookup_only import LookupOnly
from dspine_mlx.generate import stream_generate
from dspine_mlx.group.follow import Followed
from dspine_mlx.group.in_step import plain_in_step
from dspine_mlx.group.jobs import Jobs
from dspine_mlx.group.meet import Group, meet
from dspine_mlx.group.no_drafter import NoDrafter
from dspine_mlx.group.shards import check_rollback, load_part, see_whole
from dspine_mlx.group.target import LeadTarget, PartOfTarget
from dspine_mlx.load import settle_verify_kernels
from dspine_mlx.metal import exact_attention
from dspine_mlx.metal.attention import Attended
from dspine_mlx.metal.exact_attention import AsHeads
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.target import attention_race, equal_rows, race, row_kernels
from dspine_mlx.target.products import STOCK, UNPACKED
from dspine_mlx.target.race import Verdict
from dspine_mlx.target.row_kernels import RowKernels
from dspine_mlx.verify_length.schedule import prepare
from tests.support.bigrams import bigram_target, knowing_dspark
from tests.support.drafters import EVERY
from tests.support.families import drafter_config
from tests.support.tiny import SCRIPTS, Scripted


def layer_bytes(target: PartOfTarget) -> int:
    layers = [layer for layer in target.layers if layer is not None]
    return sum(v.nbytes for layer in layers for _, v in tree_flatten(layer.parameters()))


class Counted(Jobs):
    """Keeps what it followed."""

    def text(self, *args: Any, **options: Any) -> Followed:
        followed = super().text(*args, **options)
        texts.append(asdict(followed))
        return followed


def drafter_of(target: LeadTarget, case: dict[str, Any], text: list[int]) -> Drafter:
    kind = case.get("drafter")
    if kind == "lookup":
        return Drafter(LookupOnly(), target, target)
    if kind == "knowing":
        return knowing_dspark(bigram_target(target.vocab_size, **case["bigrams"])).network.bind(
            target
        )
    taps = (0, len(target.layers) - 2)
    if kind is not None:
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        network = EVERY[kind](target.model, target_layer_ids=taps, **sizes).network
        return network.bind(target)
    network = DFlash(drafter_config(target.model, target_layer_ids=taps))
    if case.get("profile"):  # by drafts of no text
        return network.bind(target)
    return Scripted(network, target, target, text=text, script=SCRIPTS["now and then"])


def plain_text(target: LeadTarget, tokenizer: Any, case: dict[str, Any]) -> list[int]:
    """By mlx-lm's own loop on all ranks; with a processor, which rank 0 alone can have, by ours."""
    options = {"max_tokens": case["max_tokens"]} | case.get("options", {})
    sampler, prompt = Sampler(**case.get("sampler", {})), case["prompt"]
    mx.random.seed(7)
    if "penalty" not in case:
        responses = plain_in_step(target, tokenizer, prompt, sampler, **options)
        return [r.token for r in responses]
    options |= {"sampler": sampler, "logits_processors": penalised(case), "verify_length": 0}
    none = NoDrafter(target)
    return [r.token for r in stream_generate(target.model, tokenizer, prompt, none, **options)]


def penalised(case: dict[str, Any]) -> list[Any]:
    """What a case's penalty for repeated tokens does to logits."""
    return make_logits_processors(repetition_penalty=case.get("penalty"))


def decoded(
    target: LeadTarget, tokenizer: Any, case: dict[str, Any], known: dict[str, list[int]]
) -> dict[str, Any]:
    """known: plain texts of cases that differ in nothing else."""
    prompt, length = case["prompt"], case["length"]
    same = json.dumps([case.get(name) for name in ("sampler", "options", "penalty")])
    if same not in known and "bigrams" not in case:
        known[same] = plain_text(target, tokenizer, case)
    plain = known.get(same, [])
    drafter = drafter_of(target, case, prompt + plain)
    if "kernels" in case:
        settle_verify_kernels(target, case["kernels"], 7)
    if length == "auto":
        prepare(drafter, profile=case.get("profile", False))
    mx.random.seed(7)
    responses = list(
        stream_generate(
            target.model,
            tokenizer,
            prompt,
            drafter,
            max_tokens=case["max_tokens"],
            sampler=Sampler(**case.get("sampler", {})),
            logits_processors=penalised(case),
            verify_length=length,
            lookup=case.get("drafter") == "lookup",
            **case.get("options", {}),
        )
    )
    return {
        "plain": plain,
        "tokens": [r.token for r in responses],
        "rounds": responses[-1].rounds,
        "width_limit": str(target.verify_kernels.width_limit),
    }


def force_products(rank: int) -> None:
    """Race as where a BLAS makes rows differ; rank 0 finds that unpacking wins everywhere, and the
    others that it never does."""
    row_kernels.blas_differs = lambda: True
    row_kernels.differing_widths = lambda target, widths: frozenset(widths)
    found = Verdict(STOCK if rank else UNPACKED, f"rank {rank}'s")
    race.Race.verdict = lambda self, matrices, rows, dtype: found  # type: ignore[method-assign]


def force_attention(rank: int) -> None:
    """Race as on Metal, also for short contexts; rank 0 finds that rows over quantised caches are
    best as heads, and the others that they never are. How often they are so is counted."""
    machine = race.Machine(metal=True, architecture="applegpu_g14s")
    race.Machine.here = classmethod(lambda cls: machine)  # type: ignore[assignment]
    attention_race.LONG, equal_rows.DEPTHS = (16, 1024, 4096), (70, 80)
    won, lost = Verdict(AsHeads(), f"rank {rank}'s"), Verdict(STOCK, f"rank {rank}'s")
    race.Race.verdict = lambda *race: lost  # type: ignore[method-assign]
    row_kernels.attention_verdict = lambda race, shape, rows: (
        won if shape.bits and not rank else lost
    )
    made = exact_attention.attend_as_heads

    def attend_as_heads(queries: mx.array, attended: Attended) -> mx.array:
        as_heads.append(1)
        return made(queries, attended)

    exact_attention.attend_as_heads = attend_as_heads


FORCED = {"products": force_products, "attention": force_attention}


def described(target: PartOfTarget) -> dict[str, Any]:
    """What a rank has of a target, and what multiplies there in verify forwards of 8 rows."""
    kernels = target.verify_kernels
    swaps = kernels.swaps[8] if isinstance(kernels, RowKernels) else []
    kinds = Counter(cls.__name__ for _, cls in swaps)
    return {
        "bytes": layer_bytes(target),
        "digest": kernels.digest,
        "swapped": kinds,
        "as heads": len(as_heads),
    }


def run(group: Group, job: dict[str, Any]) -> dict[str, Any]:
    if job["forced"]:
        FORCED[job["forced"]](group.rank)
    model, tokenizer = load_part(job["target"], group.channel, job["pipeline"], {"x": None})
    tokenizer.eos_token_ids = None  # all texts go on to their last token
    if group.follows:
        target = PartOfTarget(model, group.channel)
        check_rollback(target)
        texts.clear()
        Counted(target, tokenizer).run()
        return described(target) | {"texts": list(texts)}
    group.target = lead = LeadTarget(model, group.channel)
    check_rollback(lead)
    see_whole(lead, job["target"])
    known: dict[str, list[int]] = {}
    results = {name: decoded(lead, tokenizer, case, known) for name, case in job["cases"].items()}
    group.part("")
    return described(lead) | {"cases": results}


texts: list[dict[str, Any]] = []
as_heads: list[int] = []  # one for each time that rows attended so


def main() -> None:
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text())
    group = meet(any(job["pipeline"] for job in jobs.values()), 100)
    assert group is not None
    results = {name: run(group, job) for name, job in jobs.items()}
    path.with_suffix(f".{group.rank}").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
