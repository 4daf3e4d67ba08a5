"""Loading: a folder or Hub id to target, tokenizer and drafter."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from dspine_mlx.config import DrafterConfig, DSparkConfig, DSpineConfig
from dspine_mlx.dflash import DFlash
from dspine_mlx.dspark import DSpark
from dspine_mlx.dspine import DSpine
from dspine_mlx.errors import InputError
from dspine_mlx.metal.kernel import Kernels
from dspine_mlx.target import Target

DRAFTER_FILES = ("*.json", "*.safetensors")
DEMO = Path(__file__).parent / "demo"
METHODS: dict[str, tuple[type[DFlash], type[DrafterConfig]]] = {
    "dflash": (DFlash, DrafterConfig),
    "dspark": (DSpark, DSparkConfig),
    "dspine": (DSpine, DSpineConfig),
}


def load(
    model: str | Path | None = None,
    draft: str | Path | None = None,
    *,
    revision: str | None = None,
    draft_revision: str | None = None,
    kernels: str = "auto",
    **options: Any,
) -> tuple[nn.Module, TokenizerWrapper, DFlash | None]:
    """A target, its tokenizer, and a drafter bound to it.

    model, draft: folders or Hub ids; neither: the pair that ships with the package; a model alone
    comes without a drafter (None). kernels: see `load_drafter`. options go to mlx_lm.load
    (tokenizer_config, adapter_path ...).
    """
    if model is None and draft is None:
        model, draft = DEMO / "target", DEMO / "drafter"
    if model is None:
        raise InputError(f"the drafter {draft} needs its target; name the model it was trained for")
    if draft is not None:  # before the target's weights, which may take a minute
        read_config(resolve(draft, draft_revision))
    folder = resolve(model, revision, DEFAULT_ALLOW_PATTERNS)
    read_config(folder)
    try:
        target, tokenizer = mlx_lm.load(str(folder), **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{model} can't be loaded as a target: {reason}") from error
    if draft is None:
        return target, tokenizer, None
    drafter = load_drafter(draft, target, revision=draft_revision, kernels=kernels)
    return target, tokenizer, drafter


def load_drafter(
    path: str | Path, model: nn.Module, *, revision: str | None = None, kernels: str = "auto"
) -> DFlash:
    """A drafter from a folder or the Hub, bound to the target's embedding and head.

    kernels: "auto" runs the package's Metal kernels where there is Metal and they pass their check
    at first use (`drafter.kernels.report()` tells), "off" plain MLX operations only.

    Its weights are cast to the target's activation dtype. Everything that does not fit is named in
    one `InputError` before any forward runs.
    """
    chosen = Kernels(kernels)
    folder = resolve(path, revision)
    config, weights = read_config(folder), read_weights(folder)
    drafter_class, config_class = METHODS[identify(config, weights)]
    target = Target(model)
    with same_random_state():
        drafter = drafter_class(config_class.from_dict(config))
    check_target(drafter.config, target)
    weights = drafter.sanitize(weights)
    quantize_like(drafter, weights, config)
    check_weights(drafter, weights)
    drafter.load_weights(list(weights.items()))
    drafter.set_dtype(target.dtype)
    drafter.freeze()
    mx.eval(
        [value for m in drafter.modules() for value in m.values() if isinstance(value, mx.array)]
    )
    return drafter.bind(target, chosen)


@contextmanager
def same_random_state() -> Iterator[None]:
    """Modules draw initial weights when built; a seed the user set must not notice."""
    key = mx.array(mx.random.state[0])
    yield
    mx.random.state[0][:] = key


def resolve(
    path: str | Path, revision: str | None = None, patterns: Sequence[str] = DRAFTER_FILES
) -> Path:
    """The local folder of a model; a Hub id is downloaded first (resumed, with progress)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError(f"{path} is a file; give the folder that holds config.json")
    if isinstance(path, Path) or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise InputError(f"there is no folder {path}; give a model folder or a Hub id owner/name")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{path} is no folder here and could not be had from the Hub: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder} has no config.json; give the folder of a model or drafter")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} holds a {type(config).__name__}; it must be a JSON object")
    return config


def check_context(config: dict[str, Any], prompt_tokens: int) -> None:
    """Refuse a prompt that leaves no room in the target's context."""
    text_config = config.get("text_config") or {}
    context = config.get("max_position_embeddings", text_config.get("max_position_embeddings"))
    if context is not None and prompt_tokens >= context:
        raise InputError(
            f"the prompt has {prompt_tokens} tokens; the model's context holds {context}, "
            "the answer included"
        )


def read_weights(folder: Path) -> dict[str, mx.array]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise InputError(f"{folder} has no model*.safetensors; drafters are read from safetensors")
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            weights.update(mx.load(str(file)))
        except RuntimeError as error:
            raise InputError(f"{file} can't be read, it may be truncated: {error}") from error
    return weights


def identify(config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    """The drafting method of a checkpoint, by its tensors and not only by its config."""
    injected = any("injection." in name for name in weights)
    bridge = "selected_prefix_code_bridge" in (config.get("dflash_config") or {})
    other = {
        "candidate_selector.": "DFlash2",
        "prefix_gru.": "Domino",
    }
    for part, method in other.items():
        if any(part in name for name in weights):
            raise InputError(f"this is a {method} checkpoint, which is not supported yet")
    if bridge and not injected:
        raise InputError(
            "this is a DSpine checkpoint whose tensor names are not known here "
            f"({', '.join(sorted(weights)[:8])} ...); convert it with a table of names"
        )
    if injected:
        return "dspine"
    if config.get("dspine_config"):
        raise InputError("config.json says DSpine but there are no injection.* tensors")
    heads = any(part in name for part in ("markov_head.", "confidence_head.") for name in weights)
    named = any("DSpark" in name for name in config.get("architectures") or [])
    return "dspark" if heads or named else "dflash"


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


def quantize_like(drafter: DFlash, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    """Turn the modules that the checkpoint holds packed into quantised ones."""
    settings = config.get("quantization")
    if settings is None:
        return

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        own = settings.get(path)
        return own if isinstance(own, dict) else True

    nn.quantize(
        drafter,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=packed,
    )


def check_weights(drafter: DFlash, weights: dict[str, mx.array]) -> None:
    """Name all missing, unexpected, wrongly shaped and non-finite tensors at once."""
    expected = dict(tree_flatten(drafter.parameters()))
    shared = sorted(expected.keys() & weights.keys())
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(expected[name].shape)}"
        for name in shared
        if weights[name].shape != expected[name].shape
    ]
    floats = [n for n in shared if mx.issubdtype(weights[n].dtype, mx.floating)]
    finite = mx.stack([mx.isfinite(weights[n]).all() for n in floats]).tolist() if floats else []
    found = {
        "missing": sorted(expected.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - expected.keys()),
        "wrong shape": shapes,
        "not finite": [n for n, ok in zip(floats, finite, strict=True) if not ok],
    }
    if any(found.values()):
        listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        raise InputError(f"the drafter's tensors are not a {type(drafter).__name__}'s: {listed}")
