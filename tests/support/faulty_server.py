"""`python -m tests.support.faulty_server`: dspine_mlx.server whose requests can raise and hang.

A request with frequency_penalty 0.125 has a logits processor that raises at its sixth token, and
one with 0.25 a processor that never returns once the file that $HANGS names is there. With 0.375
the target's next forward over several texts raises, once, at that request's sixth token.
Chat templates get one second.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx_lm.server
from mlx_lm.sample_utils import LogitsProcessor

from dspine_mlx.batch.batch import Batch
from dspine_mlx.server import main, prompts

stock = mlx_lm.server._make_logits_processors


def faulty(args: Any) -> list[LogitsProcessor]:
    calls = 0

    def raises(tokens: Any, logits: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("the sixth token")
        return logits

    def breaks_the_batch(tokens: Any, logits: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            breaking.start()
        return logits

    def hangs(tokens: Any, logits: Any) -> Any:
        while Path(os.environ["HANGS"]).exists():
            time.sleep(0.01)
        return logits

    faults: dict[float, LogitsProcessor] = {0.125: raises, 0.25: hangs, 0.375: breaks_the_batch}
    fault = faults.get(args.logits.frequency_penalty)
    return [*stock(args), *([] if fault is None else [fault])]


def out_of_memory(*args: Any, **options: Any) -> Any:
    breaking.stop()
    raise RuntimeError("no memory is left")


breaking = patch.object(Batch, "feed", out_of_memory)


if __name__ == "__main__":
    mlx_lm.server._make_logits_processors = faulty
    prompts.rendering = partial(prompts.rendering, 1.0)
    main(sys.argv[1:])
