"""`python -m tests.support.seeing_server`: dspine_mlx.server whose text model takes images.

An image becomes one token, `@unicode`, at the prompt's end, with that token's own embedding.
"""

import sys
from typing import Any

import mlx.core as mx
import mlx_lm.server
from mlx_lm.models import qwen3

from dspine_mlx.server import main
from dspine_mlx.server.provider import Provider


class Processor:
    image_token = "@unicode"

    def __call__(self, text: str, images: list[Any]) -> tuple[str, list[mx.array]]:
        return text + self.image_token * len(images), [mx.zeros(1)] * len(images)


def embed_inputs(model: Any, tokens: mx.array, pixel_values: list[mx.array]) -> mx.array:
    return model.model.embed_tokens(tokens)


if __name__ == "__main__":
    sight = Processor()
    Provider.processor = property(lambda self: sight, lambda self, value: None)
    qwen3.Model.embed_inputs = embed_inputs
    mlx_lm.server._decode_image = lambda url: None
    main(sys.argv[1:])
