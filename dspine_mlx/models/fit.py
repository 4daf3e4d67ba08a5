"""Whether a drafter fits a target, by their config.json alone."""

from pathlib import Path
from typing import Any

from dspine_mlx.drafters.config import flatten
from dspine_mlx.drafters.settings import QWEN3_DEFAULTS, aux_ids, section, tap_of
from dspine_mlx.errors import InputError
from dspine_mlx.models.hub import config_of


def check_configs(model: str | Path, draft: str | Path, draft_revision: str | None = None) -> None:
    """`InputError` if the two configs contradict each other, before any weights are downloaded."""
    wrong = contradictions(config_of(draft, draft_revision), config_of(model))
    if wrong:
        raise InputError(f"the drafter {draft} does not fit {model}: {'; '.join(wrong)}")


def contradictions(drafter: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """What a drafter's config.json states and a target's denies. Values that one of them leaves
    out are settled by the tensors, when they are loaded."""
    own, text = stated(drafter), target | section(target, "text_config")
    wrong = []
    hidden = own.get("target_hidden_size") or own.get("hidden_size")
    for name, mine, theirs in (
        ("hidden size", hidden, text.get("hidden_size")),
        ("vocabulary", own.get("vocab_size"), text.get("vocab_size")),
    ):
        if type(mine) is int and type(theirs) is int and mine != theirs:
            wrong.append(f"its {name} is {mine}, the target's is {theirs}")
    layers, made_for = text.get("num_hidden_layers"), own.get("num_target_layers")
    if type(layers) is not int:
        return wrong
    taps = own.get("target_layer_ids") or []
    beyond = [tap for tap in taps if type(tap) is int and tap >= layers]
    if beyond:
        wrong.append(f"it reads layers {beyond}, the target has {layers} layers")
    if type(made_for) is int and made_for != layers:
        wrong.append(f"it was made for {made_for} target layers, the target has {layers}")
    return wrong


def stated(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that a drafter's config.json states, of any layout, flat."""
    if "speculators_model_type" in config:
        layer = QWEN3_DEFAULTS | section(config, "transformer_layer_config")
        taps = [tap_of(i) for i in aux_ids(config)]
        return flatten(layer | config) | {"target_layer_ids": taps}
    return flatten(section(config, "config") or config)
