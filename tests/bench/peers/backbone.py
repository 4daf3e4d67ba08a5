"""The backbone of the drafter that ships, as a DFlash checkpoint to start other drafters from.

    python -m tests.bench.peers.backbone runs/peers/backbone

Trained drafters of other kinds for the same target then cost some hundred steps.
"""

import json
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer

from dspine_mlx.load import DEMO


def main(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    weights = mx.load(str(DEMO / "drafter" / "model.safetensors"))
    assert isinstance(weights, dict)
    heads = ("injection.", "transfer_codes.")
    config = json.loads((DEMO / "drafter" / "config.json").read_text(encoding="utf-8"))
    del config["dspine_config"], config["is_causal"]
    folder.mkdir(parents=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {name: w for name, w in weights.items() if not name.startswith(heads)},
    )
    text = json.dumps(config | {"architectures": ["DFlashDraftModel"]}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
