"""Recording the inputs of recurrent layers in a verify forward, to replay a prefix of it.

A recurrent state after r of n rows follows from the state before and the first r rows that went
into the recurrence. A convolution's window after r rows is a slice of its input. Both inputs are
linear in n, whereas one copy of a gated delta state per row would be too large (the replay of
ReplaySSM, as the DSpine paper arXiv:2609.36173 uses it). No layer's body is copied: mlx-lm's own
mixer code runs, with a recorder in place of the function it calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static, signature
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dspine_mlx.target.swap import swapping

# mlx-lm's recurrences (output, state) = f(...), and their arguments that have one row per token
# on axis 1: gated delta (Qwen3.5, Qwen3-Next, Kimi Linear, ...) and Mamba-2.
RECURRENCES = {
    "gated_delta_update": ("q", "k", "v", "a", "b", "mask"),
    "ssm_update": ("hidden_states", "B", "C", "dt", "mask"),
}
CONSTANTS = ("A_log", "D", "dt_bias", "state")  # their other arrays, the same for all rows


class Call:
    """One call of a recurrence: its arguments, which of them have a row per token, its state."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: dict[str, Any],
        per_token: tuple[str, ...],
        state: mx.array,
    ):
        self.function, self.arguments = function, arguments
        self.per_token, self.state = per_token, state

    def state_after(self, rows: int) -> mx.array:
        """Run only the recurrence, over the first `rows` rows."""
        first = {
            name: value[:, :rows]
            for name, value in self.arguments.items()
            if name in self.per_token and value is not None
        }
        return self.function(**self.arguments | first)[1]


class Window:
    """A causal convolution's input [B, width + n, C]: the old window, then the n new rows."""

    def __init__(self, inputs: mx.array, width: int):
        self.inputs, self.width = inputs, width

    def state_after(self, rows: int) -> mx.array:
        return mx.contiguous(self.inputs[:, rows : rows + self.width])


class Record:
    """Inputs of the layer of one recurrent cache, in one forward.

    complete: a recorded recurrence or convolution explains every slot of the cache.
    """

    def __init__(self, cache: ArraysCache):
        self.cache = cache
        self.calls: list[Call] = []
        self.convolutions: list[mx.array] = []
        self.slots: list[Call | Window] = []
        self.fed = 0  # rows, if complete

    @property
    def complete(self) -> bool:
        return self.fed > 0

    def close(self, rows: int) -> None:
        """Match the slots after the forward over rows. A recurrence's slot is the array it
        returned; the others are matched with the convolutions, in the order of their calls."""
        convolutions = iter(self.convolutions)
        for state in self.cache.cache:
            call = next((c for c in self.calls if c.state is state), None)
            inputs = None if call else next(convolutions, None)
            if call is not None:
                self.slots.append(call)
            elif inputs is not None and fits(inputs, state, rows):
                self.slots.append(Window(inputs, state.shape[1]))
            else:
                return
        if next(convolutions, None) is None:
            self.fed = rows

    def holds(self) -> mx.array:
        """Whether a replay of all rows gives the state that the forward left."""
        same = [
            mx.array_equal(replayed, state)
            for replayed, state in zip(self.states_after(self.fed), self.cache.cache, strict=True)
        ]
        return mx.all(mx.stack(same))

    def states_after(self, rows: int) -> list[mx.array]:
        return [slot.state_after(rows) for slot in self.slots]


class Recorder:
    """Records the recurrent layers of a model, layer by layer, while `recording`.

    Classes of mixers and of their convolutions are swapped for recording subclasses, as in
    `Target.taps`, and swapped back on every exit. No function of a module is replaced, so other
    models, and other generators between forwards, are not affected.
    """

    def __init__(self, model: nn.Module):
        self.records: dict[int, Record] = {}  # by the id of their cache
        self.current: Record | None = None
        self.proven: bool | None = None  # not known before the first record
        self.swaps: list[tuple[nn.Module, type]] = []
        subclasses: dict[type, type] = {}
        for layer in model.layers:
            for mixer in filter(is_module, layer.children().values()):
                convolutions = [m for m in mixer.modules() if isinstance(m, nn.Conv1d)]
                for module in [mixer, *convolutions] if convolutions else []:
                    make = self.convolution if isinstance(module, nn.Conv1d) else self.mixer
                    cls = type(module)
                    subclasses[cls] = subclasses.get(cls) or make(cls)
                    self.swaps.append((module, subclasses[cls]))

    @contextmanager
    def recording(self, records: list[Record], rows: int) -> Iterator[None]:
        """Context for one forward over some rows; closes the records unless it raises."""
        self.records = {id(record.cache): record for record in records}
        try:
            with swapping(self.swaps):
                yield
        finally:
            self.records, self.current = {}, None
        for record in records:
            record.close(rows)

    def explains(self, records: list[Record]) -> bool:
        """Whether the states can be replayed from the records. The first records must prove it,
        which detects a model that stores its states in another order."""
        if not all(record.complete for record in records):
            return False
        if self.proven is None:
            self.proven = mx.all(mx.stack([record.holds() for record in records])).item()
        return self.proven

    def mixer(self, cls: type[nn.Module]) -> type[nn.Module]:
        """A mixer subclass that tells which cache it works on and calls recorded recurrences."""
        recorder = self
        methods = {name: getattr_static(cls, name) for name in dir(cls)}
        own = {name: self.rebound(m) for name, m in methods.items() if calls_recurrence(m)}
        base_call = own.pop("__call__", methods["__call__"])

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            caches = [a for a in (*args, *kwargs.values()) if isinstance(a, ArraysCache)]
            recorder.current = recorder.records.get(id(caches[0])) if len(caches) == 1 else None
            try:
                return base_call(self, *args, **kwargs)
            finally:
                recorder.current = None

        return type(cls.__name__, (cls,), own | {"__call__": call})

    def rebound(self, method: FunctionType) -> FunctionType:
        """The method's code, with recorders in place of the recurrences it calls."""
        names = method.__globals__
        recorders = {
            n: self.recurrence(names[n], rows) for n, rows in RECURRENCES.items() if n in names
        }
        return rebound(method, recorders)

    def recurrence(
        self, function: Callable[..., Any], per_token: tuple[str, ...]
    ) -> Callable[..., Any]:
        parameters = signature(function)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            if self.current is not None:
                arguments = parameters.bind(*args, **kwargs).arguments
                arrays = {n for n, value in arguments.items() if isinstance(value, mx.array)}
                if arrays <= {*per_token, *CONSTANTS}:
                    self.current.calls.append(Call(function, arguments, per_token, output[1]))
            return output

        return recorded

    def convolution(self, cls: type[nn.Module]) -> type[nn.Module]:
        recorder = self

        def call(self: nn.Module, inputs: mx.array) -> mx.array:
            if recorder.current is not None:
                recorder.current.convolutions.append(inputs)
            return cls.__call__(self, inputs)

        return type(cls.__name__, (cls,), {"__call__": call})


def fits(inputs: mx.array, state: mx.array | None, rows: int) -> bool:
    """Whether the state may be the newest rows of a convolution's input."""
    if state is None or state.ndim != 3:
        return False
    width = state.shape[1]
    return inputs.shape == (state.shape[0], width + rows, state.shape[2])


def rebound(method: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A method's code with some of its module's names bound to other objects."""
    bound = FunctionType(
        method.__code__,
        method.__globals__ | names,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    bound.__kwdefaults__ = method.__kwdefaults__
    return bound


def is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def calls_recurrence(method: Any) -> bool:
    return isinstance(method, FunctionType) and any(
        n in method.__code__.co_names for n in RECURRENCES
    )
