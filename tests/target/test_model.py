import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.errors import InputError
from dspine_mlx.target.model import Target
from tests.support.tiny import tiny_target


def tree(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_taps_change_nothing(bits: int | None) -> None:
    """Logits, caches and parameter tree are those of the untouched model, also when the device
    begins early; features are the layers' outputs."""
    model = tiny_target()
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    before, names, types = None, sorted(tree(model)), [type(layer) for layer in model.layers]
    plain, tapped = make_prompt_cache(model), make_prompt_cache(model)
    target = Target(model)
    for n in (7, 1, 16, 3):
        tokens = mx.random.randint(0, 2048, (n,))
        logits = model(tokens[None], cache=plain)[0]
        ours, features = target.forward(tokens, tapped, (1, 3), eager_taps=n < 10)
        assert mx.array_equal(logits, ours)
        for a, b in zip(plain, tapped, strict=True):
            assert mx.array_equal(a.keys_and_values()[0], b.keys_and_values()[0])
        assert features.shape == (1, n, 2 * target.hidden_size)
        before = features
    assert sorted(tree(model)) == names
    assert [type(layer) for layer in model.layers] == types
    last = before[..., target.hidden_size :]  # type: ignore[index]  # of the last layer
    assert mx.array_equal(target.head(model.model.norm(last))[0], ours)


def test_the_device_begins_at_the_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    target, begun = Target(tiny_target()), list[mx.array]()
    monkeypatch.setattr(mx, "async_eval", begun.append)
    for eager in (True, False):
        _, features = target.forward(mx.arange(5), make_prompt_cache(target.model), (1, 3), eager)
        assert len(begun) == 2
    assert mx.array_equal(mx.concatenate(begun, axis=-1), features)


def test_taps_are_removed_after_an_error() -> None:
    model = tiny_target()
    target, types = Target(model), [type(layer) for layer in model.layers]
    with pytest.raises(RuntimeError, match="stop"), target.taps((0, 2)):
        raise RuntimeError("stop")
    assert [type(layer) for layer in model.layers] == types


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", [None, "affine", "mxfp4"])
def test_head_rows_are_the_heads(tied: bool, mode: str | None) -> None:
    model = tiny_target()
    if not tied:
        model.lm_head = nn.Linear(32, 2048, bias=False)
    if mode:
        nn.quantize(model, group_size=32, bits=4, mode=mode)
    target = Target(model)
    assert (target.vocab_size, target.hidden_size) == (2048, 32)
    states, tokens = mx.random.normal((5, 32)), mx.array([[3, 99], [2047, 0]])
    wanted = target.head(states)[:, tokens.reshape(-1)]
    ours = states @ target.head_rows(tokens).reshape(-1, 32).T
    assert mx.allclose(wanted, ours, atol=1e-4)


def test_an_unknown_structure_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Linear(2, 2)
            self.layers = [self.stack]

    with pytest.raises(InputError, match=r"can't find the embedding of a .*test_model model"):
        Target(Odd())
