"""Classes swapped for one forward are back after it, however it ends."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from dspine_mlx.target.swap import swapping


class Doubled(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        return 2 * super().__call__(x)


class Negated(Doubled):
    def __call__(self, x: mx.array) -> mx.array:
        return -super().__call__(x)


def test_a_swap_changes_what_is_called_and_nothing_else() -> None:
    layer, x = nn.Linear(3, 2), mx.arange(3.0)
    plain, weight = layer(x), layer.weight
    with swapping([(layer, Doubled)]):
        assert layer(x).tolist() == (2 * plain).tolist()
        assert layer.weight is weight
    assert type(layer) is nn.Linear
    assert layer(x).tolist() == plain.tolist()
    assert set(layer.parameters()) == {"weight", "bias"}


def test_swaps_nest_and_end_on_every_exit() -> None:
    layer, other = nn.Linear(3, 2), Doubled(3, 2)
    with swapping([(layer, Doubled)]):
        with pytest.raises(ValueError, match="a layer"), swapping([(layer, Negated)]):
            raise ValueError("a layer fails")
        assert type(layer) is Doubled
    assert type(layer) is nn.Linear
    with pytest.raises(TypeError), swapping([(layer, Doubled), (other, Negated), (other, int)]):
        pass  # the last class has another layout
    assert (type(layer), type(other)) == (nn.Linear, Doubled)


def test_a_module_that_is_named_twice_gets_its_own_class_back() -> None:
    layer = nn.Linear(3, 2)
    with swapping([(layer, Doubled), (layer, Negated)]):
        assert type(layer) is Negated
    assert type(layer) is nn.Linear
