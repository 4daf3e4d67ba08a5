"""dspine-mlx generate: text from a target and a drafter."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dspine_mlx.cli.groups import Commands, grouped
from dspine_mlx.cli.options import (
    CACHE,
    PAIR,
    SAMPLING,
    MaxKvSizeOption,
    Pair,
    PrefillStepOption,
    Sampling,
    SeveralValues,
    parse_verify_length,
)
from dspine_mlx.cli.prompting import Prompting, read_prompt
from dspine_mlx.cli.ranks import leads, on_every_rank
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from dspine_mlx.round.statistics import GenerationResponse

app = Commands()

OUTPUT = "Output"
INTERRUPTED = 128 + signal.SIGINT  # a shell's exit status


class Cache(NamedTuple):
    """How the target keeps its keys and values."""

    max_kv_size: MaxKvSizeOption = None
    kv_bits: Annotated[
        int | None, typer.Option(help="Bits to quantise the cache to.", rich_help_panel=CACHE)
    ] = None
    kv_group_size: Annotated[
        int, typer.Option(help="Group size of a quantised cache.", rich_help_panel=CACHE)
    ] = 64
    quantized_kv_start: Annotated[
        int, typer.Option(help="Quantise the cache from this position on.", rich_help_panel=CACHE)
    ] = 5000
    prefill_step_size: PrefillStepOption = 2048


class Output(NamedTuple):
    """What is printed beside the text."""

    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print a table of all rounds after the text: chances, costs, the length chosen.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    show_accepted: Annotated[
        bool,
        typer.Option(
            "--show-accepted",
            help="Colour the text by origin: drafted tokens green, the target's own plain.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Also print how many rounds offered and accepted how many tokens.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    verbose: Annotated[
        str,
        typer.Option(help="As in mlx_lm.generate: False or F is --quiet.", rich_help_panel=OUTPUT),
    ] = "True"
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object only.", rich_help_panel=OUTPUT),
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="No summary.", rich_help_panel=OUTPUT)] = (
        False
    )


@app.command(cls=SeveralValues)
@on_every_rank
@grouped
def generate(
    pair: Pair,
    prompting: Prompting,
    sampling: Sampling,
    cache: Cache,
    output: Output,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens to generate at most; -1: no limit.")
    ] = 256,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="mlx-lm's name for --verify-length N.", rich_help_panel=PAIR)
    ] = None,
    quantize_activations: Annotated[
        bool,
        typer.Option(
            "--quantize-activations",
            "-qa",
            help="Quantise the target's activations like its weights.",
            rich_help_panel=PAIR,
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed; the text is mlx_lm.generate's with the same seed.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    prompt_cache_file: Annotated[
        Path | None,
        typer.Option(
            help="Caches of a prompt, from mlx_lm.cache_prompt; the new prompt follows it.",
            rich_help_panel=CACHE,
        ),
    ] = None,
) -> None:
    """Generate text: the target's own, made faster by a drafter."""
    length = parse_verify_length(pair.verify_length, num_draft_tokens)
    text = read_prompt(prompt)
    prompting.check()
    from dspine_mlx.models.needs import check_pair

    if prompt_cache_file is None:  # which names the model
        check_pair(pair.model, pair.draft_model)  # before large imports, so that it is said at once

    import mlx.core as mx

    from dspine_mlx import arguments, stream_generate
    from dspine_mlx.cli.pair import load_pair
    from dspine_mlx.cli.prompt_cache import read_saved_prompt
    from dspine_mlx.cli.prompting import prompt_tokens
    from dspine_mlx.load import check_context
    from dspine_mlx.round.sampler import Sampler

    arguments.check_max_tokens(max_tokens)
    arguments.check_cache_sizes(cache.prefill_step_size, cache.max_kv_size)
    arguments.check_kv_quantization(cache.kv_bits, cache.kv_group_size, cache.quantized_kv_start)
    sampler = Sampler(**sampling._asdict(), seeded=seed is not None)
    if seed is not None:  # as mlx_lm.generate: before loading, which draws initial weights
        arguments.check_seed(seed)
        mx.random.seed(seed)
    saved = None
    if prompt_cache_file is not None and leads.get() is not None:
        raise InputError("--prompt-cache-file can't be used on several machines; leave it out")
    if prompt_cache_file is not None:
        saved = read_saved_prompt(prompt_cache_file, pair.model, cache.kv_bits, cache.kv_group_size)
        pair = pair._replace(model=saved.model)
    loaded = load_pair(
        pair,
        length,
        tokenizer_config={} if saved is None else saved.tokenizer_config,
        model_config={"quantize_activations": True} if quantize_activations else {},
    )
    if saved is not None:
        saved.check_target(loaded.target)
    loaded.check_sampler(sampler)
    tokens = prompt_tokens(text, prompting, loaded.tokenizer, as_suffix=saved is not None)
    check_context(loaded.config, len(tokens) + (0 if saved is None else saved.tokens))
    rounds: list[str] = []
    loaded.prepare(length, not pair.no_profile, rounds.append if output.explain else None)
    responses = stream_generate(
        loaded.target,
        loaded.tokenizer,
        tokens,
        loaded.drafter,
        max_tokens=max_tokens,
        sampler=replace(sampler, xtc_special_tokens=loaded.special_tokens),
        prompt_cache=None if saved is None else saved.caches,
        verify_length=length,
        lookup=not pair.no_lookup,
        **cache._asdict(),
    )
    present(responses, output, rounds)


def present(responses: "Iterator[GenerationResponse]", output: Output, rounds: list[str]) -> None:
    """Print the text as it comes, and then what else was asked for."""
    from dspine_mlx.cli import summary

    if output.as_json:
        group = leads.get()
        typer.echo(json.dumps(summary.report(responses, 1 if group is None else group.size)))
        return
    last, interrupted = summary.show(responses, output.show_accepted)
    if rounds:
        summary.show_rounds(rounds)
    if output.stats:
        summary.show_statistics(last)
    if not output.quiet and output.verbose.lower() not in ("false", "f"):
        summary.summary(last)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
