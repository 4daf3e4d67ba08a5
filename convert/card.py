"""The README of a converted folder."""

from typing import Any

from dspine_mlx.checkpoints.detect import OURS
from dspine_mlx.drafters import METHODS


def model_card(name: str, config: dict[str, Any]) -> str:
    own = config[OURS]
    source = own["source"]
    base = f"base_model: {source}\n" if "revision" in own else ""
    origin = f"[{source}](https://huggingface.co/{source})" if base else source
    revision = f" at revision `{own['revision']}`" if base else ""
    packed = config.get("quantization")
    numbers = f"{packed['bits']} bits in groups of {packed['group_size']}" if packed else "unpacked"
    notes = "".join(f"- {note}\n" for note in own["notes"])
    return f"""---
library_name: mlx
pipeline_tag: text-generation
tags:
- mlx
- speculative-decoding
- {own["method"]}
{base}---

# {name}

A {METHODS[own["method"]].title} drafter for speculative decoding with
dspine-mlx, converted from {origin}{revision}
(layout: {own["layout"]}). It proposes tokens for the target model that it was trained on and
generates no text by itself.

- {config["num_hidden_layers"]} layers of {config["hidden_size"]}, vocabulary {config["vocab_size"]}
- reads the target's layers {list(config["target_layer_ids"])}
- block of {config["block_size"]}, first proposal from slot {config["first_slot"]}
- weights: {numbers}
{notes}
```bash
pip install dspine-mlx
dspine-mlx generate --model TARGET --draft-model {name} -p "Hello"
```

```python
from dspine_mlx import generate, load

model, tokenizer, drafter = load("TARGET", "{name}")
print(generate(model, tokenizer, "Hello", drafter))
```
"""
