"""Time and peak memory of converting a DSpine checkpoint of Qwen3-8B's size.

    python -m tests.bench.convert [--folder DIR]

Writes a synthetic checkpoint (bfloat16 in two shards, 2.4 GB, random weights) into a temporary
folder, converts it in processes of their own, and removes all of it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dspine_mlx.drafters.dspine import INJECTION, DSpine, DSpineConfig

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DSpineDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "block_size": 16,
    "is_causal": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dspine_config": {"transfer_rank": 1024, "message_size": 512, "top_k": 16},
}
RUNS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "codes in 8 bits": {"codes_bits": 8},
    "4 bits": {"quantize": True},
    "mxfp8": {"quantize": True, "q_mode": "mxfp8"},
}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """SpecForge's names and shapes, from the module's own."""
    drafter = DSpine(DSpineConfig.from_dict(QWEN3_8B))
    shapes = {name: tuple(value.shape) for name, value in tree_flatten(drafter.parameters())}
    rows, rank = shapes.pop("injection.gates.weight")
    for name, path in INJECTION.items():
        if "#" in path:
            shapes[name] = (rows // 3, rank)
    shapes["transfer_codes"] = shapes.pop("transfer_codes.weight")
    return shapes


def write_checkpoint(folder: Path) -> None:
    shapes = published_shapes()
    index: dict[str, str] = {}
    for number in (1, 2):
        file = f"model-{number:05d}-of-00002.safetensors"
        arrays: dict[str, mx.array] = {}
        for name in sorted(shapes)[number - 1 :: 2]:
            value = mx.random.normal(shapes[name], dtype=mx.bfloat16) * 0.02
            if name == "transfer_codes":
                value = value / mx.linalg.norm(value.astype(mx.float32), axis=-1, keepdims=True)
            arrays[name] = value.astype(mx.bfloat16)
        if number == 1:
            arrays["transfer_ready"] = mx.array(True)
        mx.save_safetensors(str(folder / file), arrays)
        index |= dict.fromkeys(arrays, file)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def run_one(source: Path, out: Path, options: dict[str, Any]) -> None:
    """Convert, and print seconds, CPU seconds, and peak memory beyond the imported package."""
    from dspine_mlx.convert.conversion import convert

    def resident(line: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{line}:")[1].split()[0]) * 1024

    before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    plan = convert(source, out, **options)
    figures = {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_gb": round((resident("VmHWM") - before) / 1e9, 2),
        "written_gb": round(plan.nbytes / 1e9, 2),
    }
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(Path(args.one[0]), Path(args.one[1]), json.loads(args.one[2]))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        source = Path(work) / "source"
        source.mkdir()
        write_checkpoint(source)
        for name, options in RUNS.items():
            out = Path(work) / "out"
            command = [sys.executable, "-m", "tests.bench.convert", "--one", str(source), str(out)]
            done = subprocess.run([*command, json.dumps(options)], capture_output=True, text=True)
            print(f"{name}: {done.stdout.strip() or done.stderr.strip()}", flush=True)
            shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
