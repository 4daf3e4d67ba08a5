"""From a published drafter checkpoint to an MLX folder that loads fast and names its source."""

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from huggingface_hub import HfApi

from dspine_mlx.checkpoints.detect import OURS, SCHEMA
from dspine_mlx.checkpoints.files import read_config, read_json
from dspine_mlx.checkpoints.open import Checkpoint, open_checkpoint
from dspine_mlx.convert.calibration import Calibration, read_calibration
from dspine_mlx.convert.card import model_card
from dspine_mlx.convert.plan import Options, Plan, make_plan
from dspine_mlx.convert.write import refuse_existing, staging, write_json, write_weights
from dspine_mlx.drafters.transfer_space import (
    CODES,
    SPACE,
    head_matrix,
    stored_space,
    transfer_codes,
)
from dspine_mlx.errors import InputError
from dspine_mlx.load import check_target, resolve
from dspine_mlx.target.model import Target
from dspine_mlx.target.open import check_config, opening

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def convert(
    hf_path: str | Path,
    mlx_path: str | Path = "mlx_drafter",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    *,
    target: str | Path | None = None,
    codes: str | Path | None = None,
    codes_bits: int | str | None = None,
    codes_from_head: bool = False,
    dequantize_head: bool = False,
    rename: str | Path | None = None,
    target_layer_ids: list[int] | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Convert a drafter; the first nine arguments are those of `mlx_lm.convert`.

    Args:
        hf_path: folder or Hub id of a checkpoint of one of `dspine_mlx.drafters.METHODS`.
        mlx_path: the folder to write; it must not exist.
        target: the target model, to check shapes, to leave out an embedding and head equal to its
            own, and to compute C where a checkpoint has none.
        codes: a file with the transfer codes C, if the checkpoint has none.
        codes_bits: 8, 4 or "none" for exact codes; None: 8 when quantising, else exact.
        codes_from_head: store the projection [d, r] in place of C, to be rebuilt when loading.
        dequantize_head: let C be computed from a quantised target's head, with a warning.
        rename: a JSON file {tensor name in the files: name in SpecForge's layout}.
        target_layer_ids: taps, for a config that states none.
        dry_run: plan only.
        progress: called with the bytes written so far and in all.
    """
    out = Path(mlx_path).expanduser()
    refuse_existing(out)
    options = Options(
        quantize, q_group_size, q_bits, q_mode, dtype_named(dtype), bits(codes_bits, quantize)
    )
    folder = source_folder(hf_path, revision)
    checkpoint = open_checkpoint(
        folder,
        rename=rename_table(rename),
        codes=Path(codes) if codes else None,
        target_layer_ids=target_layer_ids,
    )
    plan = plan_for(checkpoint, options, target, codes_from_head, dequantize_head)
    if dry_run:
        return plan
    write(plan, out, describe(hf_path, folder), progress)
    if upload_repo:
        upload(out, upload_repo)
    return plan


def plan_for(
    checkpoint: Checkpoint,
    options: Options,
    target: str | Path | None,
    codes_from_head: bool,
    dequantize_head: bool,
) -> Plan:
    """Make the plan, including what only the target can provide."""
    rank = checkpoint.codes_rank
    lacks = rank is not None and not {CODES, SPACE[0]} & checkpoint.sources.keys()
    if "quantization" in checkpoint.raw:
        raise InputError("this checkpoint is packed already; convert from what it was made from")
    if codes_from_head and rank is None:
        raise InputError(f"{checkpoint.layout.name} drafters have no codes; drop --codes-from-head")
    computed: dict[str, mx.array] = {}
    drop: dict[str, str] = {}
    if target is not None:
        loaded = load_target(target)
        check_target(checkpoint.config, loaded)
        drop = equal_embeddings(checkpoint, loaded)
        if codes_from_head and rank is not None:
            own = None if lacks else checkpoint.arrays([CODES])[CODES]
            computed = stored_space(head_matrix(loaded), own, rank)
            drop |= {CODES: "rebuilt from the target's head when loading"}
        elif rank is not None and lacks:
            head = head_matrix(loaded, dequantize_head)
            computed = {CODES: transfer_codes(head, rank)[0]}
            drop |= {CODES: "computed from the target's head; --probe shows if the drafter fits it"}
    elif codes_from_head or lacks:
        raise InputError(
            "this needs the target's LM head: give --target"
            + (", or --codes with the file of transfer codes" if lacks else "")
        )
    checkpoint.check(checkpoint.build(), given=computed)
    return make_plan(checkpoint, options, drop=drop, computed=computed)


def source_folder(path: str | Path, revision: str | None) -> Path:
    """The checkpoint's folder; torch files are downloaded only if there is nothing safer."""
    folder = resolve(path, revision)
    if not Path(path).expanduser().is_dir() and not any(folder.glob("*.safetensors")):
        return resolve(path, revision, patterns=("*.json", "*.bin", "*.pt"))
    return folder


def load_target(path: str | Path) -> Target:
    folder = resolve(path)
    with opening(str(path)):
        check_config(read_config(folder))
        return Target(mlx_lm.utils.load_model(folder, lazy=True)[0])


def equal_embeddings(checkpoint: Checkpoint, target: Target) -> dict[str, str]:
    """Find the checkpoint's embedding and head if they equal the target's."""
    shared = {"embed_tokens.weight": target.embed, "lm_head.weight": target.lm_head}
    drop = {}
    for path, module in shared.items():
        if path not in checkpoint.sources or "scales" in module:
            continue
        if checkpoint.shapes[path] == tuple(module.weight.shape):
            value = checkpoint.arrays([path])[path]
            if mx.array_equal(value, module.weight).item():
                drop[path] = "equal to the target's, which is used"
    return drop


def write(
    plan: Plan, out: Path, source: dict[str, Any], progress: Callable[[int, int], None]
) -> None:
    calibration = read_calibration(plan.checkpoint)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, plan.nbytes)

    with staging(out) as folder:
        digests = write_weights(plan, folder, count)
        for name, value in calibration.files.items():
            write_json(folder / name, value)
        config = output_config(plan, source, digests, calibration)
        (folder / "README.md").write_text(model_card(out.name, config), encoding="utf-8")
        write_json(folder / "config.json", config)  # last: without it nothing loads


def output_config(
    plan: Plan, source: dict[str, Any], digests: dict[str, str], calibration: Calibration
) -> dict[str, Any]:
    """The drafter's settings, its source, and its packing."""
    checkpoint = plan.checkpoint
    config = {
        name: value
        for name, value in dataclasses.asdict(checkpoint.config).items()
        if value is not None and value != ()
    }
    if calibration.temperatures and "confidence_temperatures" in vars(checkpoint.config):
        config["confidence_temperatures"] = calibration.temperatures
    config[OURS] = source | {
        "schema": SCHEMA,
        "version": version("dspine-mlx"),
        "method": checkpoint.method.name,
        "layout": checkpoint.layout.name,
        "sha256": digests,
        "notes": list(plan.notes) + calibration.notes,
    }
    quantization = plan.quantization()
    return config | ({"quantization": quantization} if quantization else {})


def describe(path: str | Path, folder: Path) -> dict[str, Any]:
    """The source's name and, for a snapshot of the Hub, its revision."""
    if Path(path).expanduser().is_dir():
        return {"source": folder.resolve().name}
    return {"source": str(path), "revision": folder.name}


def rename_table(path: str | Path | None) -> dict[str, str] | None:
    if path is None:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"there is no file {path}; --rename takes a JSON table of tensor names")
    table = read_json(file)
    wrong = [name for name, value in table.items() if not isinstance(value, str)]
    if wrong:
        raise InputError(f"{path} gives {wrong[0]!r} no name; it must map names to names")
    return table


def dtype_named(name: str | None) -> mx.Dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise InputError(f"dtype is {name!r}; it must be {', '.join(DTYPES)}")
    return DTYPES[name]


def bits(codes_bits: int | str | None, quantize: bool) -> int | None:
    if codes_bits is None:
        return 8 if quantize else None
    if str(codes_bits) not in ("8", "4", "none"):
        raise InputError(f"codes-bits is {codes_bits!r}; it must be 8, 4 or none")
    return None if codes_bits == "none" else int(codes_bits)


def upload(folder: Path, repo: str) -> None:
    api = HfApi()
    api.create_repo(repo_id=repo, exist_ok=True)
    api.upload_folder(folder_path=str(folder), repo_id=repo, repo_type="model")
