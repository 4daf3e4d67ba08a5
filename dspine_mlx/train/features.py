"""The target's features and last states, computed during training or once into a file."""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np

from dspine_mlx.checkpoints.files import read_json
from dspine_mlx.errors import InputError
from dspine_mlx.target.model import Target
from dspine_mlx.train.data import Sequence


def observe(target: Target, taps: tuple[int, ...]) -> Callable:
    """The online source: one forward of the target per batch."""

    def features(sequences: list[Sequence], n: int) -> tuple[mx.array, mx.array]:
        tokens = np.zeros((len(sequences), n), np.int32)
        for i, s in enumerate(sequences):
            tokens[i, : len(s.tokens)] = s.tokens
        hidden, rows = target.states(mx.array(tokens), taps)
        return mx.stop_gradient(rows), mx.stop_gradient(hidden)

    return features


class FeatureCache:
    """Features and last states of every sequence, in one memory-mapped float16 file.

    folder holds rows.f16 [tokens, (m + 1) d] and index.json; it is complete or absent.
    """

    def __init__(
        self, folder: Path, target: Target, taps: tuple[int, ...], sequences: list[Sequence]
    ):
        self.folder, self.target, self.taps = folder, target, taps
        self.width = (len(taps) + 1) * target.hidden_size
        lengths = [len(s.tokens) for s in sequences]
        ends = np.cumsum(lengths).tolist()
        self.first = {s.key: end - len(s.tokens) for s, end in zip(sequences, ends, strict=True)}
        self.count = ends[-1]
        digest = sha256(json.dumps([list(taps), target.hidden_size, lengths]).encode())
        for s in sequences:
            digest.update(s.tokens.tobytes())
        digest.update(np.array(target.head_rows(mx.arange(8)).astype(mx.float32)).tobytes())
        self.key = digest.hexdigest()

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.count * self.width * 2

    def fill(self, sequences: list[Sequence], progress: Callable[[int, int], None]) -> None:
        """Compute all features unless they are there; they are moved into place when complete."""
        index = self.folder / "index.json"
        if index.exists():
            if read_json(index).get("key") != self.key:
                raise InputError(
                    f"{self.folder} holds the features of other data, taps or target; "
                    "name an empty folder"
                )
            self.open()
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if self.size > free:
            raise InputError(
                f"the feature cache needs {self.size / 1e9:.1f} GB, {self.folder} has "
                f"{free / 1e9:.1f} GB free; train without a cache"
            )
        source, part = observe(self.target, self.taps), self.folder / "rows.part"
        with part.open("wb") as file:
            for done, sequence in enumerate(sequences):
                n = len(sequence.tokens)
                rows = mx.concatenate(source([sequence], n), axis=-1)[0]
                if not mx.isfinite(rows.astype(mx.float16)).all().item():
                    raise InputError(
                        f"the features of line {sequence.line} exceed float16; "
                        "train without a cache"
                    )
                file.write(np.array(rows.astype(mx.float16)).tobytes())
                progress(done + 1, len(sequences))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / "rows.f16")
        temporary = self.folder / "index.part"
        temporary.write_text(json.dumps({"key": self.key, "tokens": self.count}))
        os.replace(temporary, index)
        self.open()

    def open(self) -> None:
        shape = (self.count, self.width)
        self.rows = np.memmap(self.folder / "rows.f16", np.float16, "r", shape=shape)

    def __call__(self, sequences: list[Sequence], n: int) -> tuple[mx.array, mx.array]:
        rows = np.zeros((len(sequences), n, self.width), np.float16)
        for i, s in enumerate(sequences):
            first = self.first[s.key]
            rows[i, : len(s.tokens)] = self.rows[first : first + len(s.tokens)]
        both = mx.array(rows).astype(self.target.dtype)
        split = self.width - self.target.hidden_size
        return both[..., :split], both[..., split:]
