"""From a command line's prompt to token ids."""

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dspine_mlx.cli.options import SystemPromptOption, TemplateOption
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

QUERY = "<query>"  # stands in for the prompt while the template is tried out


class Prompting(NamedTuple):
    """What is put around the prompt."""

    system_prompt: SystemPromptOption = None
    prefill_response: Annotated[
        str | None, typer.Option(help="Beginning of the answer, which the model continues.")
    ] = None
    chat_template_args: TemplateOption = "{}"
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Use the prompt as it is.")
    ] = False
    use_default_chat_template: Annotated[
        bool,
        typer.Option(
            "--use-default-chat-template",
            help="As in mlx_lm.generate, which always uses the tokenizer's chat template.",
        ),
    ] = False
    extra_eos_token: Annotated[
        list[str] | None, typer.Option(help="Further tokens that end the text.")
    ] = None
    image: Annotated[
        list[str] | None, typer.Option(help="Refused: drafters read text only.", hidden=True)
    ] = None

    def check(self) -> None:
        """`InputError` for what can be seen before the models are loaded."""
        if self.image:
            raise InputError("--image can't be used: drafters read text; see mlx_lm.generate")
        parse_object("--chat-template-args", self.chat_template_args)


def read_prompt(prompt: str | None) -> str:
    """Read the text of -p, or of standard input for '-'."""
    if prompt is None:
        raise InputError("there is no prompt; give one with -p TEXT, or '-p -' for standard input")
    text = read_standard_input() if prompt == "-" else readable("--prompt", prompt)
    if prompt != "-":
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    if not text:
        raise InputError("the prompt is empty; give at least one token")
    return text


def read_standard_input() -> str:
    if sys.stdin is None:
        raise InputError("standard input is closed, so '-p -' has nothing to read; use -p TEXT")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8: {error}") from error
    except OSError as error:  # a folder
        raise InputError(f"standard input can't be read: {error.strerror}") from error


def readable(flag: str, text: str) -> str:
    """Check an argument's text. Python keeps bytes that are not in the locale's encoding as
    surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode("utf-8")
        except UnicodeError as error:
            raise InputError(f"{flag} has bytes that are not UTF-8: {text!a}") from error
    return text


def parse_object(flag: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InputError(f"{flag} is {value!r}; it must be a JSON object")
    own = parsed.keys() & {"add_generation_prompt", "continue_final_message", "tokenize"}
    if own:
        raise InputError(f"{flag} sets {', '.join(sorted(own))}, which --prefill-response decides")
    return parsed


def prompt_tokens(
    text: str, prompting: Prompting, tokenizer: "TokenizerWrapper", *, as_suffix: bool
) -> list[int]:
    """The prompt's tokens, in the chat template unless that is switched off. as_suffix: only what
    follows a prompt cache."""
    for token in prompting.extra_eos_token or []:
        add_eos_token(tokenizer, readable("--extra-eos-token", token))
    if prompting.ignore_chat_template or not has_template(tokenizer, prompting.system_prompt):
        return list(tokenizer.encode(text))
    messages = messages_of(text, prompting.system_prompt, prompting.prefill_response)
    arguments = parse_object("--chat-template-args", prompting.chat_template_args)
    return apply_template(tokenizer, messages, arguments, as_suffix=as_suffix)


def add_eos_token(tokenizer: "TokenizerWrapper", token: str) -> None:
    try:
        tokenizer.add_eos_token(token)
    except ValueError as error:
        raise InputError(f"--extra-eos-token {token!r} is no token of this model") from error


def has_template(tokenizer: "TokenizerWrapper", system_prompt: str | None) -> bool:
    if not tokenizer.has_chat_template:
        if system_prompt is not None:
            raise InputError(
                "this tokenizer has no chat template, so --system-prompt can't be used"
            )
        typer.echo("This tokenizer has no chat template; the prompt is used as it is.", err=True)
    return tokenizer.has_chat_template


def messages_of(
    prompt: str, system_prompt: str | None, prefill: str | None
) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        messages.insert(
            0, {"role": "system", "content": readable("--system-prompt", system_prompt)}
        )
    if prefill is not None:
        messages.append({"role": "assistant", "content": readable("--prefill-response", prefill)})
    return messages


def apply_template(
    tokenizer: "TokenizerWrapper",
    messages: list[dict[str, str]],
    arguments: dict[str, Any],
    *,
    as_suffix: bool = False,
) -> list[int]:
    """Render the messages with the model's own chat template.

    as_suffix: only from the user's text on; what comes before is in a prompt cache.
    """
    prefilled = messages[-1]["role"] == "assistant"
    how = {"continue_final_message": prefilled, "add_generation_prompt": not prefilled}
    try:
        if as_suffix:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **how, **arguments)
            tried = [m | {"content": QUERY} if m["role"] == "user" else m for m in messages]
            frame = tokenizer.apply_chat_template(tried, tokenize=False, **how, **arguments)
            ids = tokenizer.encode(text[frame.index(QUERY) :], add_special_tokens=False)
        else:
            ids = list(tokenizer.apply_chat_template(messages, **how, **arguments))
    except Exception as error:  # noqa: BLE001  a template is a program of the model's publisher
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"this model's chat template fails on the prompt: {reason}; see --chat-template-args, "
            "or use --ignore-chat-template"
        ) from error
    if not ids:
        raise InputError(
            "this model's chat template makes nothing of the prompt; use --ignore-chat-template"
        )
    return ids


def chat_text(
    tokenizer: "TokenizerWrapper", messages: list[dict[str, str]], arguments: dict[str, Any]
) -> str:
    """The text that the chat template makes of messages, up to where the answer begins."""
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **arguments
            )
        )
    except Exception as error:  # noqa: BLE001  a template is a program of the model's publisher
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"this model's chat template fails on the message: {reason}") from error
