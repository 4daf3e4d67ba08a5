"""One way of decoding in one package, in that package's own environment; needs nothing of ours.

    python worker.py WAY --target FOLDER [--draft-model FOLDER] [--length N] [--scratch FOLDER]

Reads requests {"prompt": [ids], "max_tokens": n}, one a line, and answers each with one line:
{"tokens", "seconds", "cpu_seconds", "rounds", "memory"}: the text without its end token, wall and
CPU time of the whole call, target forwards after the prompt's, peak GB. The first line says
{"version"} and {"folder"} of the package. Whatever goes wrong is one line {"error"}. What a package
measures of this machine goes to the scratch folder.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import mlx.core as mx

Text = tuple[list[int], int]  # tokens, rounds
Generate = Callable[[list[int], int], Text]
EndTokens = set[int]


def plain(options: argparse.Namespace) -> tuple[Generate, EndTokens]:
    """mlx_lm.stream_generate; with a draft model its own speculative decoding."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(options.target)
    extra: dict[str, Any] = {}
    if options.draft_model:
        extra["draft_model"] = mlx_lm.load(options.draft_model)[0]
        if options.length:
            extra["num_draft_tokens"] = options.length

    def generate(prompt: list[int], n: int) -> Text:
        responses = list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=n, **extra))
        return [r.token for r in responses], sum(not r.from_draft for r in responses)

    return generate, set(tokenizer.eos_token_ids)


def dspine(options: argparse.Namespace) -> tuple[Generate, EndTokens]:
    """dspine_mlx.stream_generate; without a length, with its own choice of one."""
    import dspine_mlx
    from dspine_mlx.verify_length import store

    if options.scratch is not None:
        store.cache_folder = lambda: options.scratch
    model, tokenizer, drafter = dspine_mlx.load(options.target, options.draft_model)
    length = options.length or "auto"

    def generate(prompt: list[int], n: int) -> Text:
        tokens, response = [], None
        for response in dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=n, verify_length=length
        ):
            tokens.append(response.token)
        done = response.statistics if response else None
        return tokens, done.rounds + done.plain if done else 0

    return generate, set(tokenizer.eos_token_ids)


def mlx_dspark(options: argparse.Namespace) -> tuple[Generate, EndTokens]:
    """ARahim3's mlx-dspark; without a length, with the controller its `calibrate` returns."""
    import mlx_dspark
    from mlx_dspark.generate import eos_token_ids

    target, tokenizer = mlx_dspark.load_target(options.target, require_tap=True)
    markov = read_config(options.draft_model)["architectures"] == ["DSparkDraftModel"]
    mode = "dspark" if markov else "dflash"
    load = mlx_dspark.load_drafter if markov else mlx_dspark.load_dflash
    run = mlx_dspark.speculative_generate if markov else mlx_dspark.dflash_generate
    drafter, _ = load(options.draft_model, quantize=False)
    if not markov:
        drafter.bind(target.model)
    controller = None
    if not options.length:
        names = {"target_repo": options.target, "drafter_repo": options.draft_model}
        controller = mlx_dspark.calibrate(
            target, drafter, mode=mode, **names, cache_dir=options.scratch and str(options.scratch)
        )

    def generate(prompt: list[int], n: int) -> Text:
        result = run(
            target,
            tokenizer,
            drafter,
            prompt_ids=prompt,
            max_new_tokens=n,
            max_draft_tokens=options.length,
            cap_controller=controller,
        )
        return result.token_ids[:n], result.num_rounds

    return generate, eos_token_ids(tokenizer)


def dflash_mlx(options: argparse.Namespace) -> tuple[Generate, EndTokens]:
    """bstnxbt's dflash-mlx, as its `generate` command sets it up: its default is to shorten blocks
    that are badly accepted; with any length, whole blocks."""
    from dflash_mlx.engine.events import SummaryEvent, TokenEvent
    from dflash_mlx.runtime import get_stop_token_ids, stream_dflash_generate
    from dflash_mlx.runtime.bundle import load_runtime_bundle
    from dflash_mlx.runtime.context import build_offline_runtime_context

    context = build_offline_runtime_context(verify_mode="dflash" if options.length else None)
    bundle = load_runtime_bundle(
        model_ref=options.target, draft_ref=options.draft_model, verify_config=context.verify
    )
    stop = get_stop_token_ids(bundle.tokenizer)

    def generate(prompt: list[int], n: int) -> Text:
        events = list(
            stream_dflash_generate(
                target_model=bundle.target_model,
                target_ops=bundle.target_ops,
                tokenizer=bundle.tokenizer,
                draft_model=bundle.draft_model,
                draft_backend=bundle.draft_backend,
                prompt_tokens_override=prompt,
                max_new_tokens=n,
                stop_token_ids=stop,
                runtime_context=context,
            )
        )
        rounds = [e.cycles_completed for e in events if isinstance(e, SummaryEvent)]
        return [e.token_id for e in events if isinstance(e, TokenEvent)], rounds[-1]

    return generate, set(stop)


def zlab(options: argparse.Namespace) -> tuple[Generate, EndTokens]:
    """z-lab's dflash, its MLX module; always the whole block."""
    from dflash import model_mlx

    model_mlx.snapshot_download = lambda folder, **_: folder  # it takes drafters by Hub id only
    model, tokenizer = model_mlx.load(options.target)
    drafter = model_mlx.load_draft(options.draft_model)

    def generate(prompt: list[int], n: int) -> Text:
        responses = list(model_mlx.stream_generate(model, drafter, tokenizer, prompt, max_tokens=n))
        tokens = [token for r in responses for token in r.tokens]
        return tokens, sum(r.accepted is not None for r in responses)

    return generate, set(tokenizer.eos_token_ids)


WAYS = {
    "mlx_lm": ("mlx-lm", plain),
    "dspine_mlx": ("dspine-mlx", dspine),
    "mlx_dspark": ("mlx-dspark", mlx_dspark),
    "dflash_mlx": ("dflash-mlx", dflash_mlx),
    "dflash": ("dflash", zlab),
}


def read_config(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    return config


def answer(generate: Generate, end: EndTokens, prompt: list[int], n: int) -> dict[str, Any]:
    mx.reset_peak_memory()
    start, cpu = time.perf_counter(), time.process_time()
    tokens, rounds = generate(prompt, n)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    if tokens and tokens[-1] in end:
        tokens = tokens[:-1]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rounds": rounds,
        "memory": mx.get_peak_memory() / 1e9,
    }


def replies(options: argparse.Namespace, requests: TextIO) -> Iterator[dict[str, Any]]:
    package, load = WAYS[options.way]
    spec = importlib.util.find_spec(options.way)
    assert spec is not None
    folder = list(spec.submodule_search_locations or [])[0]
    generate, end = load(options)
    yield {"version": importlib.metadata.version(package), "folder": folder}
    for line in requests:
        request = json.loads(line)
        yield answer(generate, end, request["prompt"], request["max_tokens"])


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("way", choices=sorted(WAYS))
    result.add_argument("--target", required=True)
    result.add_argument("--draft-model")
    result.add_argument("--length", type=int)
    result.add_argument("--scratch", type=Path)
    return result


def main() -> None:
    options = parser().parse_args()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print goes elsewhere
    try:
        for reply in replies(options, sys.stdin):
            print(json.dumps(reply), file=channel, flush=True)
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is a result
        text = " ".join(str(error).split())
        print(json.dumps({"error": f"{type(error).__name__}: {text}"}), file=channel, flush=True)


if __name__ == "__main__":
    main()
