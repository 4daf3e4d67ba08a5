"""Kernels for several rows inside a target's verifying forwards, and nowhere else.

Only the classes of the target's linear layers are swapped, and only within `verifying`: their
parameters, plain decoding and prefill stay as they are.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.nn as nn

from dspine_mlx.metal.rows import MAX_ROWS, Matrix
from dspine_mlx.target import checked_widths, equal_rows
from dspine_mlx.target import verdicts as on_file
from dspine_mlx.target.attention_race import attention_verdict, contexts
from dspine_mlx.target.checked_widths import check_key
from dspine_mlx.target.equal_rows import Packing, blas_differs, compared_widths, differing_widths
from dspine_mlx.target.model import Target
from dspine_mlx.target.products import APART, STOCK, Product, to_dict
from dspine_mlx.target.race import Machine, Race, Verdict
from dspine_mlx.target.row_attention import Chosen, RowAttention, shapes_of
from dspine_mlx.target.row_experts import expert_layers, expert_verdict, swapped_experts
from dspine_mlx.target.row_layers import dtypes_of_rows, linear_layers, swapped
from dspine_mlx.target.swap import swapping
from dspine_mlx.target.verdicts import AnyShape, AttentionShape, ExpertShape, Shape, Verdicts

SECONDS = 5.0  # a race at load stops after about this long; the next load goes on
EXACT_SECONDS = 60.0  # in exact mode, where the check is due again after every race
CHECK_SECONDS = 60.0  # the check stops after about this long; the next load goes on

Told = Callable[[str], None]


def untold(what: str) -> None: ...


class RowKernels:
    """The verdicts on a target's shapes, and the class swap that applies them.

    shapes: the target's linear layers by shape; the LM head's is among them, tied or not. verdicts:
    by shape and number of rows. attention: its kinds of attention, raced where there is Metal. In
    exact mode, `check` tests on the whole target which widths have plain decoding's bits. unequal:
    the other widths, and where they differ.
    """

    def __init__(self, target: Target, race: Race | None = None, folder: Path | None = None):
        self.race, self.folder = race or Race("off"), folder
        self.key = on_file.kernels_key(self.race) | target.ranks.key
        self.target = target
        self.exact = self.race.mode == "exact"
        self.attend = Chosen(self.race.mode)
        self.row_attention = RowAttention(target, self.attend)
        self.checked: set[int] = set()
        self.unequal: dict[int, str] = {}
        self.races = target.ranks.agreed(not self.race.idle)
        layers = linear_layers(target)
        dtypes = dtypes_of_rows(target, layers) if self.races else {}
        self.shapes: dict[Shape, list[nn.Module]] = {}
        for layer in layers:
            shape = Shape.of(Matrix.of(layer), dtypes.get(id(layer), target.dtype))
            self.shapes.setdefault(shape, []).append(layer)
        self.packings: set[tuple[int, int]] = set()  # of caches whose attention has been raced
        raced = self.race.machine.metal and self.races
        self.attention: list[AttentionShape] = []
        self.verdicts: Verdicts = {}
        self.widths: list[int] = []
        self.experts = expert_layers(target) if raced else {}
        self.know(shapes_of(target) if raced else [])
        self.swaps: dict[int, list[tuple[nn.Module, type[nn.Module]]]] = {}
        self.arrange()

    @property
    def all_shapes(self) -> list[AnyShape]:
        return [*self.shapes, *self.experts, *self.attention]

    def know(self, attention: Iterable[AttentionShape]) -> None:
        """Add kinds of attention, each at every context that has a verdict of its own."""
        self.attention += [
            shape._replace(context=context)
            for shape in attention
            for context in contexts(self.race.mode)
        ]
        if self.folder is not None and self.races:
            wanted = set(self.all_shapes)
            known = on_file.read(self.folder, self.key)
            self.verdicts |= {k: v for k, v in known.items() if k[0] in wanted}

    def expect_caches(self, bits: int, group_size: int) -> None:
        """Race attention to caches of this packing, too, at the widths that were settled before. In
        exact mode, check the target once more where rows won't attend one by one."""
        raced = self.races and self.race.machine.metal
        if raced and (bits, group_size) not in self.packings:
            with self.target.ranks.together(do="caches", bits=bits, group_size=group_size):
                self.race_caches(bits, group_size)

    def race_caches(self, bits: int, group_size: int) -> None:
        """Every rank's part of `expect_caches`."""
        packing = Packing(bits, group_size)
        self.packings.add(packing)
        plain = {shape._replace(context=0) for shape in self.attention if not shape.bits}
        self.know(shape._replace(**packing._asdict()) for shape in sorted(plain) if not shape.sinks)
        self.settle(self.widths)
        # A stage of a pipeline may have no attention; all check or none does.
        if self.exact and not self.target.ranks.agreed(not self.chosen(packing)):
            passed = self.checked - set(self.unequal)
            self.checked -= passed
            self.check(passed, packing=packing)

    def settle(
        self, widths: Iterable[int], seconds: float | None = None, told: Told = untold
    ) -> None:
        """Race each shape at each number of rows without a verdict, the coarse steps of widths
        first, until the time is up. What is not raced is left to stock. told: what is done now."""
        if not self.races:
            return
        asked = {w for w in widths if 2 <= w <= MAX_ROWS}
        self.widths = sorted(asked.union(self.widths), key=lambda w: (-(w & -w), w))
        new: Verdicts = {}
        begun, limit = self.race.clock(), EXACT_SECONDS if self.exact else SECONDS
        limit = limit if seconds is None else seconds
        for rows in self.widths:
            for shape in self.all_shapes:
                if (shape, rows) in self.verdicts or rows not in asked:
                    continue
                if self.race.clock() - begun > limit:
                    break
                told(f"Racing kernels for verify rows, once per target: {rows} rows")
                new[shape, rows] = self.raced(shape, rows)
        found = self.target.ranks.gathered(on_file.to_json(self.verdicts | new))
        self.verdicts = on_file.common(found, set(self.all_shapes))
        self.arrange()
        if new and self.folder is not None:
            on_file.write(self.folder, self.key, new)

    def raced(self, shape: AnyShape, rows: int) -> Verdict:
        if isinstance(shape, AttentionShape):
            return attention_verdict(self.race, shape, rows)
        if isinstance(shape, ExpertShape):
            return expert_verdict(self.race, shape, self.experts[shape], rows)
        matrices = [Matrix.of(layer) for layer in self.shapes[shape]]
        return self.race.verdict(matrices, rows, shape.mlx_dtype)

    def lacks(self, widths: Iterable[int]) -> bool:
        """Whether a shape has no verdict for one of these widths."""
        return any((shape, rows) not in self.verdicts for shape in self.shapes for rows in widths)

    def arrange(self) -> None:
        """Make the classes that layers switch to, by the number of rows of a forward. In exact mode
        every layer switches, as a layer may get fewer rows than the forward has. Else only those
        switch for which something is faster than stock."""
        self.swaps = {rows: [] for rows in range(2, MAX_ROWS + 1)}
        unsettled = APART if self.exact else STOCK
        for shape, layers in self.shapes.items():
            products = self.products_of(shape)
            kinds = set(map(type, layers))
            classes = {k: swapped(k, products, unsettled, shape.mlx_dtype) for k in kinds}
            for rows, swaps in self.swaps.items():
                if self.exact or products.get(rows, STOCK) != STOCK:
                    swaps += [(layer, classes[type(layer)]) for layer in layers]
        for experts, layers in self.experts.items():
            products = self.products_of(experts)
            cls = swapped_experts(experts.chosen, products, experts.mlx_dtype)
            for rows, swaps in self.swaps.items():
                if products.get(rows, STOCK) != STOCK:
                    swaps += [(layer, cls) for layer in layers]
        if self.attend.settle(self.verdicts) or self.exact:
            for swaps in self.swaps.values():
                swaps += self.row_attention.swaps

    def products_of(self, shape: AnyShape) -> dict[int, Product]:
        """By number of rows."""
        return {rows: v.product for (of, rows), v in self.verdicts.items() if of == shape}

    @contextmanager
    def verifying(self, rows: int) -> Iterator[None]:
        """Context for one forward over several rows, of one text or of several. Linear layers
        multiply as the race decided for the number of rows they get. One row is plain decoding, and
        more than 32 are left to MLX: nothing is swapped. Every exit restores the classes."""
        swaps = self.swaps.get(rows, [])
        with swapping(swaps):
            yield

    def check(
        self,
        widths: Iterable[int],
        depths: Collection[int] | None = None,
        packing: Packing | None = None,
        told: Told = untold,
    ) -> None:
        """In exact mode, compare verify forwards of these widths with as many one-row forwards, bit
        for bit, the narrowest first, until the time is up. A width may not be used until it has
        passed. Results are kept in the folder. packing: of KV caches. told: what is done now."""
        done = self.checked if packing is None else set()
        asked = {w for w in widths if w > 1} - done
        if not self.exact or not asked:
            return
        depths, key, known = depths or equal_rows.DEPTHS, {}, {}
        if self.folder is not None:
            products = self.key | {"products": self.digest}
            if packing is not None:
                products["caches"] = [*packing, *self.chosen(packing)]
            key = check_key(self.target.model, products, depths)
            known = checked_widths.read(self.folder, key)
        found = self.target.ranks.gathered(json.dumps(sorted(known)))
        on_all = set.intersection(*(set(json.loads(widths)) for widths in found))
        known = {width: known[width] for width in on_all}
        new = sorted(asked - known.keys())
        if new:
            known |= self.compared(new, depths, packing, told)
            if self.folder is not None:
                checked_widths.write(self.folder, key, known)
        self.unequal |= {width: known[width] for width in asked & known.keys() if known[width]}
        self.checked |= asked & known.keys()

    def compared(
        self, widths: list[int], depths: Collection[int], packing: Packing | None, told: Told
    ) -> dict[int, str]:
        """Compare as many widths as the time allows, on every rank the same."""
        begun, found = self.race.clock(), {}
        doing = "Checking that verify rows have plain decoding's bits, once per target"
        told(doing)
        pairs = compared_widths(self.target, widths, self.verifying, depths, packing)
        for width, where in pairs:
            found[width] = where
            told(f"{doing}: {len(found)} of {len(widths)} widths")
            if not self.target.ranks.agreed(self.race.clock() - begun <= CHECK_SECONDS):
                break
        return found

    @property
    def width_limit(self) -> float:
        """The most rows a verify forward may have. In exact mode, all widths up to it have passed
        the check; 1: the target decodes plainly."""
        if not self.exact:
            return math.inf
        passed = self.checked - set(self.unequal)
        return next(w for w in count(1) if w + 1 not in passed)

    @property
    def digest(self) -> str:
        """Identifies what runs, for files that depend on it; "" if all is stock. Quantised caches
        don't count: costs are measured with caches as they are."""
        chosen = self.chosen()
        if not chosen and not self.exact:
            return ""
        text = json.dumps([self.race.mode, self.key["kernels"], chosen])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def chosen(self, packing: Packing | None = None) -> list[Any]:
        """What runs and is not stock, or in exact mode rows apart: without quantised caches, or all
        that concerns caches of one packing."""
        unsettled = APART if self.exact else STOCK
        return [
            [*shape, rows, to_dict(verdict.product)]
            for (shape, rows), verdict in on_file.sorted_items(self.verdicts)
            if verdict.product != unsettled and on_file.packing_of(shape) == packing
        ]

    def promise(self) -> str:
        """What verify forwards promise about plain decoding's bits, in a sentence."""
        if not self.exact:
            runs = "kernels that won their race here"
            if self.race.idle or not self.digest:
                runs = f"MLX's own products ({self.race.idle or 'nothing was faster here'})"
            return f"Verify rows are made by {runs} and may round in other ways than a single row."
        if self.width_limit > 1:
            return (
                "Verify forwards give plain decoding's very logits on this machine, for this "
                f"target, up to {self.width_limit:.0f} rows, as checked."
            )
        if not self.checked:
            return "No width has been checked against plain decoding yet, so none is verified."
        where = self.unequal.get(min(self.checked), "")
        return (
            "No verify forward gives plain decoding's very logits here "
            f"({min(self.checked)} rows: {where}), so the target decodes plainly."
        )

    def report(self) -> dict[str, Any]:
        """Facts for `report` and health pages: every verdict, or why there is none."""
        return {
            "mode": self.race.mode,
            "idle": self.race.idle,
            "digest": self.digest,
            "shapes": len(self.shapes),
            "attention": len(self.attention),
            "checked": sorted(self.checked),
            "unequal": {str(width): where for width, where in sorted(self.unequal.items())},
            "verdicts": [
                on_file.as_dict(shape, rows, verdict)
                for (shape, rows), verdict in on_file.sorted_items(self.verdicts)
            ],
        }

    def explain(self) -> list[str]:
        """A sentence per shape, for `doctor`."""
        if self.race.idle:
            return [f"verify rows are MLX's: {self.race.idle}"]
        lines = [self.promise()] if self.exact else []
        layers: dict[AnyShape, list[nn.Module]] = dict(self.shapes.items())
        layers.update(self.experts.items())
        for shape in self.all_shapes:
            found = sorted((rows, v) for (of, rows), v in self.verdicts.items() if of == shape)
            parts = [f"{rows} rows {on_file.in_words(verdict)}" for rows, verdict in found]
            count = len(layers[shape]) if shape in layers else 0  # attention: not counted
            before = f"{count} x " if count else ""
            lines.append(f"{before}[{shape}]: {'; '.join(parts) or 'not raced yet'}")
        return lines


def prepare(
    target: Target,
    mode: str,
    widths: Iterable[int],
    folder: Path | None,
    newest: bool = False,
    told: Told = untold,
) -> RowKernels:
    """Race the kernels of a target whose verify forwards have these widths and, in exact mode,
    check them. Verdicts are kept in a folder. newest: see `Race`. told: called with what is done
    now, in a few words, as it may take minutes.

    Without Metal, "auto" races an unpacked product at the widths at which an optimised BLAS gives
    other bits than plain decoding anyway.
    """
    machine, asked = Machine.here(), frozenset(widths)
    alike = mode != "auto" or target.ranks.agreed(machine.metal or not blas_differs())
    if not alike:
        machine = replace(machine, differing=asked)
        kernels = RowKernels(target, Race(mode, machine), folder)
        if not target.ranks.agreed(not kernels.lacks(asked)):  # testing the target takes seconds
            machine = replace(machine, differing=differing_widths(target, asked))
    kernels = RowKernels(target, Race(mode, machine, newest=newest), folder)
    kernels.settle(asked, told=told)
    kernels.check(asked, told=told)
    return kernels
