"""A report about this machine to show to anyone: figures and facts, nothing private.

Only what is named here goes in: no prompt, generated text or path, and no name of a user, host or
model. Models appear as digests and numbers from their config.json.
"""

import hashlib
import json
import logging
import platform
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dspine_mlx.batch.on_file import batch_costs_on_file
from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load, resolve
from dspine_mlx.measure.compare import Models, add_margins, compare, summaries
from dspine_mlx.measure.doctor import Finding, examine
from dspine_mlx.measure.kernels_on_file import checks_on_file, races_on_file
from dspine_mlx.measure.phases import split
from dspine_mlx.round.sampler import Sampler
from dspine_mlx.verify_length.on_file import calibrations_on_file, costs_on_file
from dspine_mlx.verify_length.schedule import prepare
from dspine_mlx.verify_length.store import device_name, structure

log = logging.getLogger(__name__)
FORMAT = 1
PROMPTS = (
    "Maria has 9 toys. Her sister has 3 fewer toys than she has. How many toys do they have "
    "together?",
    "A baker makes 24 rolls an hour. How many rolls does she make in 7 hours?",
)
WAYS, TOKENS, REPEAT = ["auto", "fixed:4"], 64, 3
ROUND = 4  # drafted tokens of the round that is taken apart
NESTED = ("text_config", "dflash_config", "dspine_config", "quantization")
FACTS = {
    "model_type", "architectures", "dtype", "torch_dtype", "bits", "group_size", "mode",
    "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "head_dim",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "sliding_window",
    "tie_word_embeddings", "num_experts", "num_local_experts", "num_experts_per_tok",
    "moe_intermediate_size", "block_size", "target_layer_ids", "num_target_layers", "top_k",
    "transfer_rank", "message_size", "markov_rank", "is_causal",
}  # fmt: skip
WORD = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def bundle(
    model: str | Path | None = None, draft_model: str | Path | None = None, bench: bool = False
) -> dict[str, Any]:
    """Gather facts about machine, packages and pair, what is on file (costs, calibrations, races of
    kernels, checks of exact mode), and with `bench` a short measurement. Without models, the pair
    is the one that ships."""
    if model is None and draft_model is None:
        model, draft_model = DEMO / "target", DEMO / "drafter"
    if model is None or draft_model is None:
        raise InputError("a report is about a pair; give both --model and --draft-model, or none")
    about = {"target": facts(resolve(model)), "drafter": facts(resolve(draft_model))}
    pair, rows = loaded(model, draft_model), None
    if pair is not None and pair.drafter is not None:
        prepare(pair.drafter)  # measures its costs, if they are not on file
        rows = pair.drafter.target.verify_kernels.report()
        about["target"]["structure"] = structure(pair.model)
        about["drafter"]["structure"] = structure(pair.drafter.network)
    return {
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%d"),
        "system": {
            "system": platform.system(),
            "macos": platform.mac_ver()[0] or None,
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "device": device_name(),
        "versions": {name: version(name) for name in ("dspine-mlx", "mlx", "mlx-lm")},
        "findings": [shown(finding) for finding in examine()],
        "pair": about | {"loads": pair is not None},
        "verify_kernels": rows,
        "races": [race.as_dict() for race in races_on_file()],
        "exact_checks": list(checks_on_file()),
        "costs": [asdict(entry) for entry in costs_on_file()],
        "batch_costs": [asdict(entry) for entry in batch_costs_on_file()],
        "calibrations": [asdict(entry) for entry in calibrations_on_file()],
        "bench": measure(pair) if bench and pair is not None else None,
    }


def loaded(model: str | Path, draft_model: str | Path) -> Models | None:
    """Load the pair; one that fails to load is reported, not raised."""
    try:
        target, tokenizer, drafter = load(model, draft_model)
    except (ValueError, RuntimeError) as error:
        log.warning("the pair does not load, and the report says no more of it: %s", error)
        return None
    return Models(target, tokenizer, drafter, Sampler())


def shown(finding: Finding) -> dict[str, str]:
    detail = "not shown, it may hold names" if finding.private else finding.detail
    return {"name": finding.name, "status": finding.status, "detail": detail}


def facts(folder: Path) -> dict[str, Any]:
    """Known numbers and words of a config.json, and its digest."""
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]
    return {"config": digest} | dict(known(read_config(folder)))


def known(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in NESTED and isinstance(value, Mapping):
            yield from known(value)
        elif key in FACTS and all(map(harmless, value if isinstance(value, list) else [value])):
            yield key, value


def harmless(value: Any) -> bool:
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or isinstance(value, bool | int | float)


def measure(pair: Models) -> dict[str, Any]:
    """Measure short texts in three modes, and where a round's time goes."""
    prompts = [
        pair.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        if pair.tokenizer.has_chat_template
        else pair.tokenizer.encode(prompt)
        for prompt in PROMPTS
    ]
    *_, comparison = compare(pair, WAYS, prompts, max_tokens=TOKENS, repeat=REPEAT)
    rows = summaries(comparison, greedy=True)
    add_margins(rows, comparison, pair, prompts)
    return {
        "tokens": TOKENS,
        "ways": rows,
        "split": asdict(split(pair, prompts[0], ROUND, TOKENS)),
    }


def as_text(facts: Mapping[str, Any]) -> str:
    """The report as Markdown: for people, then as JSON in a fenced block."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    system = facts["system"]
    where = f"macOS {system['macos']}" if system["macos"] else system["system"]
    lines = [
        "# dspine-mlx report",
        "",
        f"{facts['device']}, {where}, Python {system['python']}; {versions}; {facts['date']}",
        "",
        *(f"- {f['status']}: {f['name']}: {f['detail']}" for f in facts["findings"]),
        "",
    ]
    if facts["bench"]:
        lines += [*bench_table(facts["bench"]["ways"]), ""]
    return "\n".join([*lines, "```json", json.dumps(facts, indent=1), "```", ""])


def bench_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| way | tokens/s | speed-up | tokens per round | same text |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
        yield (
            f"| {row['way']} | {row['tokens_per_second']:.1f} | {speedup} "
            f"| {row['acceptance_length']:.2f} | {row['identical']}/{row['texts']} |"
        )
