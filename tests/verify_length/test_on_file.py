"""Files in the cache folder, whoever wrote them: a wrong value anywhere is at most a warning. It is
used or measured again, and `doctor` lists it."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.cache_folder import write_json
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.generate import stream_generate
from dspine_mlx.verify_length import on_file, store
from dspine_mlx.verify_length.calibration import Calibration
from dspine_mlx.verify_length.costs import Curve
from dspine_mlx.verify_length.schedule import prepare
from tests.support.tiny import plain_steps, random_prompt, tiny_dflash

Place = tuple[Any, ...]
NESTED = ["[" * 100_000, '{"a":' * 100_000, '{"modes": {}, "modes": {}}', "1" * 5000, "\0", "null"]
NUMBERS = st.floats() | st.integers() | st.sampled_from([10**400, -(10**400), 1e308, 1e-320])
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=3) | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    if here:
        yield here
    items = value.items() if isinstance(value, dict) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else items:
        yield from places(inner, (*here, key))


def changed(data: Any, place: Place, value: Any) -> Any:
    data = deepcopy(data)
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data


@pytest.fixture
def drafter(model: nn.Module) -> Drafter:
    """A pair with costs and calibrations on file."""
    drafter = tiny_dflash(model)
    prepare(drafter)
    modes = {"greedy": Calibration((0.5,) * 7, (0.1,) * 7, 99, 0.2, 0.01)}
    store.save_calibrations(store.calibration_path(drafter), drafter, modes)
    return drafter


def read_all(drafter: Drafter) -> None:
    """What generation and `doctor` do with the files."""
    curve = store.read_costs(drafter).curve
    assert curve is None or isinstance(curve, Curve)
    for calibration in store.load_calibrations(drafter).values():
        assert len(calibration.biases) == drafter.config.num_proposals
    costs, calibrations = list(on_file.costs_on_file()), list(on_file.calibrations_on_file())
    assert len(costs) == len(calibrations) == 1


@pytest.mark.parametrize("path_of", [store.costs_path, store.calibration_path])
def test_any_value_in_any_place(drafter: Drafter, path_of: Callable[[Drafter], Path]) -> None:
    path = path_of(drafter)
    good = json.loads(path.read_text())
    somewhere = st.sampled_from(list(places(good)))

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    @given(somewhere, VALUES)
    def spoil(place: Place, value: Any) -> None:
        path.write_text(json.dumps(changed(good, place, value)))
        read_all(drafter)

    spoil()


EXTREME = st.sampled_from([5e-324, 1e-315, 1e-300, 1e-9, 1e-3, 1e3, 1e6, 1e300, 1.7e308])


@pytest.mark.parametrize("path_of", [store.costs_path, store.calibration_path])
def test_texts_come_out_right_whatever_numbers_are_on_file(
    drafter: Drafter, tokenizer: TokenizerWrapper, path_of: Callable[[Drafter], Path]
) -> None:
    """All numbers of a file times the same one: ratios stay as they are, and no check of ratios
    finds it."""
    path, model, prompt = path_of(drafter), drafter.verifier.model, random_prompt(6)
    good = json.loads(path.read_text())
    kinds = ("plain", "draft", "verify", "temperatures", "biases", "slopes")
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=12)]

    @settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
    @given(factor=EXTREME, names=st.sets(st.sampled_from(kinds), min_size=1))
    def decode(factor: float, names: set[str]) -> None:
        spoilt = deepcopy(good)
        for place in places(good):
            value = at(good, place)
            if names & {str(key) for key in place} and isinstance(value, float):
                at(spoilt, place[:-1])[place[-1]] = value * factor
        path.write_text(json.dumps(spoilt))
        prepare(drafter)
        responses = stream_generate(model, tokenizer, prompt, drafter, max_tokens=12)
        assert [r.token for r in responses] == plain

    decode()


def at(data: Any, place: Place) -> Any:
    for key in place:
        data = data[key]
    return data


@pytest.mark.parametrize("text", NESTED, ids=lambda text: text[:12])
@pytest.mark.parametrize("path_of", [store.costs_path, store.calibration_path])
def test_any_text(drafter: Drafter, path_of: Callable[[Drafter], Path], text: str) -> None:
    path_of(drafter).write_text(text)
    read_all(drafter)


@pytest.mark.parametrize("path_of", [store.costs_path, store.calibration_path])
def test_what_is_no_file(drafter: Drafter, path_of: Callable[[Drafter], Path]) -> None:
    path = path_of(drafter)
    path.unlink()
    path.symlink_to(path.with_name("nowhere"))
    read_all(drafter)
    path.unlink()
    path.symlink_to(path)
    read_all(drafter)
    path.unlink()
    path.mkdir()
    read_all(drafter)


def test_what_can_not_be_put_into_place_is_not_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "costs.json" / "inner").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "costs.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
    with pytest.raises(TypeError):
        write_json(tmp_path / "other.json", {"a": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
