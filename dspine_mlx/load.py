"""Loading: a folder or Hub id to target, tokenizer and drafter."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from dspine_mlx.arguments import check_kernels, check_model
from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.checkpoints.names import pattern_of
from dspine_mlx.checkpoints.open import Checkpoint, open_checkpoint
from dspine_mlx.checkpoints.packing import packing_of, stated_packing
from dspine_mlx.checkpoints.rope import assumed_rope_theta, states_rope_theta
from dspine_mlx.drafters.config import DrafterConfig
from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.drafters.lookup_only import LookupOnly
from dspine_mlx.drafters.transfer_space import CODES, SPACE, rebuilt_codes
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import OFF, Kernels
from dspine_mlx.models.choose import choose
from dspine_mlx.models.fit import check_configs
from dspine_mlx.models.hub import (
    DOWNLOAD_ERRORS,
    check_reachable,
    folder_of,
    not_downloaded,
    online,
)
from dspine_mlx.models.needs import AUTO, LOOKUP
from dspine_mlx.round.lookup import COPIED
from dspine_mlx.target.model import Target
from dspine_mlx.target.open import open_target
from dspine_mlx.target.row_kernels import prepare, untold
from dspine_mlx.verify_length import store
from dspine_mlx.verify_length.readings import use_reading

log = logging.getLogger(__name__)
DRAFTER_FILES = ("*.json", "*.safetensors")
DEMO = Path(__file__).parent / "demo"


def load(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    kernels: str = "auto",
    draft_quant: int | None = None,
    told: Callable[[str], None] = untold,
    **options: Any,
) -> tuple[nn.Module, TokenizerWrapper, Drafter | None]:
    """Load a target, its tokenizer, and a drafter bound to the target.

    model, draft: folders or Hub ids; neither: the pair that ships with the package; a model alone
    comes without a drafter (None). draft "auto": the registry's first drafter for this model;
    "lookup": no network, only copies of text that repeats itself, for any model.
    kernels, draft_quant, told: see `load_drafter`. options go to mlx_lm.load (tokenizer_config,
    adapter_path ...).
    """
    if model is None and draft in (None, AUTO):
        model, draft = DEMO / "target", DEMO / "drafter"
    if model is None and draft == LOOKUP:
        model = DEMO / "target"
    if model is None:
        raise InputError(f"the drafter {draft} needs its target; name the model it was trained for")
    if draft == AUTO:
        draft, draft_revision, _ = choose(str(model))
    if draft not in (None, LOOKUP):  # before the target's weights, which may take a minute
        if folder_of(draft) is None or folder_of(model) is None:
            check_configs(model, draft, draft_revision)
        read_config(resolve(draft, draft_revision))
    check_kernels(kernels)
    check_draft_quant(draft_quant)
    folder = resolve(model, revision, DEFAULT_ALLOW_PATTERNS)
    read_config(folder)
    target, tokenizer = open_target(folder, str(model), **options)
    if draft is None:
        return target, tokenizer, None
    drafter = load_drafter(
        draft,
        target,
        revision=draft_revision,
        kernels=kernels,
        draft_quant=draft_quant,
        told=told,
    )
    return target, tokenizer, drafter


def load_drafter(
    path: str | Path,
    model: nn.Module | Target,
    *,
    revision: str | None = None,
    kernels: str = "auto",
    draft_quant: int | None = None,
    told: Callable[[str], None] = untold,
) -> Drafter:
    """Load a drafter from a folder or the Hub, bound to the target's embedding and head.

    The folder may be a checkpoint as published, or one that `dspine_mlx.convert` has written.
    Its weights are cast to the target's activation dtype. If anything does not fit, one
    `InputError` names it all before any forward runs.

    kernels: "auto" runs the package's kernels where they pass their check and win their race
    against MLX's (`drafter.kernels.report()` and `drafter.target.verify_kernels.explain()` tell).
    "exact" verifies only widths that have shown plain decoding's bits on this machine. "off" runs
    plain MLX operations only.
    draft_quant: 4 or 8: pack the drafter's large matrices to that many bits; None: leave them as
    they come.
    told: called with what is done now where a first load takes long: in "exact", up to two minutes.
    """
    if not isinstance(model, Target):
        check_model(model)
    check_draft_quant(draft_quant)
    check_kernels(kernels)
    if path == LOOKUP:
        return lookup_drafter(model, kernels, told)
    chosen = Kernels("off" if kernels == "off" else "auto")
    folder = resolve(path, revision)
    target = model if isinstance(model, Target) else Target(model)
    checkpoint = open_checkpoint(folder)
    check_target(checkpoint.config, target)
    if not states_rope_theta(checkpoint.raw):
        log.warning("%s: %s", path, assumed_rope_theta(checkpoint.config.rope_theta))
    settle_verify_kernels(target, kernels, max(checkpoint.config.num_proposals, COPIED), told)
    drafter = assemble_drafter(checkpoint, target, chosen, draft_quant)
    drafter.folder = folder
    use_reading(drafter, store.load_reading(drafter))
    return drafter


def lookup_drafter(
    model: nn.Module | Target, kernels: str = "auto", told: Callable[[str], None] = untold
) -> Drafter:
    """A drafter without a network, whose rounds offer only copies of earlier text."""
    target = model if isinstance(model, Target) else Target(model)
    settle_verify_kernels(target, kernels, COPIED, told)
    return Drafter(LookupOnly(), target, target)


def settle_verify_kernels(
    target: Target, mode: str, offered: int, told: Callable[[str], None] = untold
) -> None:
    """Choose the kernels that multiply the rows of this target's verify forwards."""
    job = {"do": "kernels", "mode": mode, "proposals": offered}
    with target.ranks.together(**job), same_random_state():
        found = prepare(target, mode, range(2, offered + 2), store.cache_folder(), told=told)
    target.verify_kernels = found
    if found.width_limit < 2:
        log.warning(found.promise())


def assemble_drafter(
    checkpoint: Checkpoint,
    target: Target,
    kernels: Kernels = OFF,
    draft_quant: int | None = None,
) -> Drafter:
    """Build an opened checkpoint's drafter with its weights, bound to a target."""
    with same_random_state():
        network = checkpoint.build()
    quantize_like(network, checkpoint.sources, checkpoint.raw)
    checkpoint.check(network)
    weights = checkpoint.arrays()
    check_finite(weights)
    if SPACE[0] in weights:
        weights[CODES] = rebuilt_codes({name: weights.pop(name) for name in SPACE}, target)
    network.load_weights(list(weights.items()))
    network.set_dtype(target.dtype)
    if draft_quant is not None:
        pack_large(network, checkpoint.method.large, draft_quant)
    network.freeze()
    mx.eval(
        [value for m in network.modules() for value in m.values() if isinstance(value, mx.array)]
    )
    return network.bind(target, kernels)


@contextmanager
def same_random_state() -> Iterator[None]:
    """Restore the random state after the block: modules draw initial weights when built, and the
    user's seed must not be affected."""
    key = mx.array(mx.random.state[0])
    yield
    mx.random.state[0][:] = key


def resolve(
    path: str | Path, revision: str | None = None, patterns: Sequence[str] = DRAFTER_FILES
) -> Path:
    """The local folder of a model; a Hub id is downloaded first (resumed, with progress)."""
    folder = folder_of(path)
    if folder is not None:
        return folder
    here = not online()
    try:
        return Path(
            snapshot_download(
                str(path),
                revision=revision,
                allow_patterns=list(patterns),
                local_files_only=here,
            )
        )
    except DOWNLOAD_ERRORS as error:
        if here:
            check_reachable(str(path))
        raise not_downloaded(path, error) from error


def check_context(config: dict[str, Any], prompt_tokens: int) -> None:
    """Refuse a prompt that leaves no room in the target's context."""
    text_config = config.get("text_config") or {}
    context = config.get("max_position_embeddings", text_config.get("max_position_embeddings"))
    if context is not None and prompt_tokens >= context:
        raise InputError(
            f"the prompt has {prompt_tokens} tokens; the model's context holds {context}, "
            "the answer included: shorten the prompt"
        )


def check_target(config: DrafterConfig, target: Target) -> None:
    """Refuse a drafter whose shapes or taps don't fit the target."""
    size = config.target_hidden_size or config.hidden_size
    problems = []
    if config.hidden_size != target.hidden_size or size != target.hidden_size:
        problems.append(
            f"its hidden size is {config.hidden_size} over features of {size}, "
            f"the target's is {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        problems.append(
            f"its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
        )
    if config.mask_token_id >= target.vocab_size:
        problems.append(f"its mask token {config.mask_token_id} is outside the vocabulary")
    beyond = [i for i in config.target_layer_ids if i >= len(target.layers)]
    if beyond:
        problems.append(f"it reads layers {beyond}, the target has {len(target.layers)} layers")
    if config.num_target_layers not in (None, len(target.layers)):
        problems.append(
            f"it was made for {config.num_target_layers} target layers, "
            f"the target has {len(target.layers)}"
        )
    if problems:
        raise InputError(f"this drafter does not fit this target: {'; '.join(problems)}")


def quantize_like(network: DFlash, paths: Collection[str], config: Mapping[str, Any]) -> None:
    """Turn the modules that the checkpoint holds packed into quantised ones."""
    settings = config.get("quantization")
    if settings is None:
        return
    default = stated_packing(settings)

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in paths or not isinstance(module, nn.Linear | nn.Embedding):
            return False
        own = settings.get(path)
        how = stated_packing(own) if isinstance(own, dict) else default
        if module.weight.shape[-1] % how["group_size"]:
            raise InputError(
                f"{path} has rows of {module.weight.shape[-1]}, which can't be packed in groups "
                f"of {how['group_size']}"
            )
        return how

    nn.quantize(network, class_predicate=packed)


def check_draft_quant(bits: int | None) -> None:
    if bits is not None and (type(bits) is not int or bits not in (4, 8)):
        raise InputError(f"draft_quant is {bits!r}; it must be 4 or 8 bits, or left out")


def pack_large(network: DFlash, large: Collection[str], bits: int) -> None:
    """Quantise a loaded drafter's large matrices, those that `convert --quantize` packs."""
    packing = packing_of("affine", bits, None)

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        plain = isinstance(module, nn.Linear | nn.Embedding)
        fits = plain and module.weight.shape[-1] % packing["group_size"] == 0
        return packing if fits and pattern_of(f"{path}.weight") in large else False

    nn.quantize(network, class_predicate=packed)


def check_finite(weights: dict[str, mx.array]) -> None:
    floats = [name for name, value in weights.items() if mx.issubdtype(value.dtype, mx.floating)]
    finite = mx.stack([mx.isfinite(weights[name]).all() for name in floats]).tolist()
    wrong = [name for name, ok in zip(floats, finite, strict=True) if not ok]
    if wrong:
        raise InputError(f"the drafter's weights are not finite: {', '.join(wrong)}")
