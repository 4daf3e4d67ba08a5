"""dspine-mlx chat: a conversation in the terminal."""

from dataclasses import replace
from typing import Annotated

import typer

from dspine_mlx.cli.groups import Commands, grouped
from dspine_mlx.cli.options import (
    SAMPLING,
    MaxKvSizeOption,
    Pair,
    PrefillStepOption,
    Sampling,
    SystemPromptOption,
    TemplateOption,
    parse_verify_length,
)
from dspine_mlx.cli.prompting import parse_object
from dspine_mlx.cli.ranks import on_every_rank
from dspine_mlx.errors import InputError

app = Commands()


@app.command()
@on_every_rank
@grouped
def chat(
    pair: Pair,
    sampling: Sampling,
    system_prompt: SystemPromptOption = None,
    chat_template_args: TemplateOption = "{}",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens per answer at most; -1: no limit.")
    ] = 256,
    seed: Annotated[int, typer.Option(help="Random seed.", rich_help_panel=SAMPLING)] = 0,
    max_kv_size: MaxKvSizeOption = None,
    prefill_step_size: PrefillStepOption = 2048,
) -> None:
    """Chat with a model. Drafted tokens are coloured; /help lists the commands.

    Enter sends a message, Alt-Enter or Ctrl-J starts a new line. Ctrl-C ends an answer, Ctrl-D the
    chat. Messages are kept in ~/.cache/dspine-mlx/chat-history, for the arrow keys.
    """
    length = parse_verify_length(pair.verify_length)
    template = parse_object("--chat-template-args", chat_template_args)
    from dspine_mlx.models.needs import check_pair

    check_pair(pair.model, pair.draft_model)  # before large imports, so that it is said at once

    import mlx.core as mx

    from dspine_mlx.arguments import check_cache_sizes, check_max_tokens, check_seed
    from dspine_mlx.cli.chat_loop import Chat
    from dspine_mlx.cli.conversation import Conversation
    from dspine_mlx.cli.pair import load_pair
    from dspine_mlx.cli.prompting import chat_text
    from dspine_mlx.round.sampler import Sampler

    check_max_tokens(max_tokens)
    check_cache_sizes(prefill_step_size, max_kv_size)
    sampler = Sampler(**sampling._asdict())
    check_seed(seed)
    mx.random.seed(seed)
    loaded = load_pair(pair, length)
    loaded.check_sampler(sampler)
    tokenizer = loaded.tokenizer
    if not tokenizer.has_chat_template:
        raise InputError("this tokenizer has no chat template; use dspine-mlx generate")
    loaded.prepare(length, not pair.no_profile)
    conversation = Conversation(
        loaded.target,
        tokenizer,
        loaded.drafter,
        lambda messages: chat_text(tokenizer, messages, template),
        loaded.config,
        max_kv_size,
    )
    conversation.system = system_prompt
    options = {
        "max_tokens": max_tokens,
        "prefill_step_size": prefill_step_size,
        "lookup": not pair.no_lookup,
    }
    sampler = replace(sampler, xtc_special_tokens=loaded.special_tokens)
    Chat(conversation, sampler, length, options).run()
