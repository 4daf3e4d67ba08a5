"""What can't be split is refused before anything is loaded, in one sentence; what ranks share."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from dspine_mlx.drafters.dflash import DFlash
from dspine_mlx.errors import InputError, LostRank
from dspine_mlx.group.channel import Channel
from dspine_mlx.group.shards import INDEX, check_alike, check_split, fingerprint
from dspine_mlx.group.watchdog import Watchdog
from dspine_mlx.target.ranks import Alone
from dspine_mlx.verify_length.store import pair_key
from tests.support.families import build, drafter_config
from tests.support.message_log import lead
from tests.support.ranks import save_target


def folder_of(family: str, tmp_path: Path, parts: int = 0, **changes: int) -> Path:
    return save_target(build(family, **changes), tmp_path / family, parts)


def refusal(folder: Path, size: int, pipeline: bool) -> str:
    """What is said without any weights."""
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(InputError) as caught:
        check_split(folder, "the model", size, pipeline)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path)  # 4 heads over 2
    check_split(folder, "the model", 2, pipeline=False)
    assert refusal(folder, 4, False) == (
        "the model can't be split 4 ways: it has num_key_value_heads 2"
    )
    assert "num_attention_heads 4, num_key_value_heads 2" in refusal(folder, 3, False)


def test_linear_heads_that_do_not_divide(tmp_path: Path) -> None:
    folder = folder_of("qwen3_5", tmp_path, num_key_value_heads=4)
    assert refusal(folder, 4, False).endswith("it has linear_num_key_heads 2")


def test_an_index_is_needed_for_a_pipeline(tmp_path: Path) -> None:
    folder = folder_of("qwen3_moe", tmp_path, parts=2)
    check_split(folder, "the model", 4, pipeline=True)
    (folder / INDEX).unlink()
    assert f"the model has no {INDEX}, which --pipeline reads" in refusal(folder, 4, True)


def test_families_that_mlx_lm_can_not_split(tmp_path: Path) -> None:
    qwen3, gemma = folder_of("qwen3", tmp_path), folder_of("gemma3_text", tmp_path)
    assert "is a qwen3, which mlx-lm can't split by layers" in refusal(qwen3, 2, True)
    assert "is a gemma3_text, which mlx-lm can't split into tensors" in refusal(gemma, 2, False)


def test_more_stages_than_layers(tmp_path: Path) -> None:
    folder = folder_of("qwen3_moe", tmp_path, parts=2)
    assert "has 4 layers, too few for a pipeline of 5" in refusal(folder, 5, True)


def test_the_random_state_is_left_alone(tmp_path: Path) -> None:
    folder = folder_of("qwen3", tmp_path)
    mx.random.seed(3)
    before = mx.array(mx.random.state[0])
    check_split(folder, "the model", 2, pipeline=False)
    assert mx.array_equal(before, mx.random.state[0])


class Others(Channel):
    """A group whose other ranks say what the test says."""

    def __init__(self, *words: str):
        super().__init__(mx.distributed.init(), Watchdog(0, 1))
        self.words = words

    def gather(self, word: str, seconds: float | None = None) -> list[str]:
        return [word, *self.words]


def test_what_ranks_must_have_in_common(tmp_path: Path) -> None:
    one = folder_of("qwen3", tmp_path)
    other = save_target(build("qwen3", seed=1), tmp_path / "other")
    own, theirs = (fingerprint(folder, str(folder), False) for folder in (one, other))
    differing = {name for name, value in own.items() if theirs[name] != value}
    assert differing == {"weights"}
    check_alike(Others(json.dumps(own)), own, "the model")
    with pytest.raises(InputError, match="rank 1 has other weights of the model than rank 0"):
        check_alike(Others(json.dumps(theirs)), own, "the model")
    older = own | {"versions": "mlx 0.1"}
    with pytest.raises(InputError, match=r"rank 2 has mlx 0\.1; rank 0 has dspine-mlx "):
        check_alike(Others(json.dumps(own), json.dumps(older)), own, "the model")


def test_words_of_any_length() -> None:
    words = ["", "é" * 1000, '{"a": 1}']
    for word in words:
        assert Others().gather_whole(word) == [word]
    sums = [mx.array([0, 2000, 8]), mx.array(list("".join(words).encode()), mx.uint8)]

    class Heard(Others):
        """The second of three ranks, which hears what all have said."""

        def sum(self, values: mx.array) -> mx.array:
            heard = sums.pop(0)
            own = slice(1, 2) if values.size == 3 else slice(0, 2000)
            assert values[own].tolist() == heard[own].tolist()
            assert values.sum().item() == heard[own].sum().item()
            return heard

    channel = Heard()
    channel.rank, channel.size = 1, 3
    assert channel.gather_whole(words[1]) == words


def test_all_ranks_hear_of_one_ranks_problem() -> None:
    with pytest.raises(InputError, match=r"^rank 1: no such folder$"):
        Others("no such folder").agree("")
    with pytest.raises(InputError, match=r"^it is on all ranks$"):
        Others("it is on all ranks").agree("it is on all ranks")
    Others("").agree("")


def test_which_errors_mean_a_lost_rank() -> None:
    channel = Others()
    channel.note(RuntimeError("[malloc] no memory"))
    assert not channel.closed
    with pytest.raises(LostRank, match="rank 0 of 1 lost another rank"):
        channel.note(RuntimeError("[ring] connection to a peer was lost"))
    assert channel.closed


def test_costs_are_kept_per_group_and_split() -> None:
    """A pair's own costs, those of two ranks, of three, and of two in a pipeline."""
    target, _ = lead(build("qwen3_moe"))
    drafter = DFlash(drafter_config(target.model)).bind(target)
    keys = []
    for size, split in ((2, "tensor"), (3, "tensor"), (2, "pipeline")):
        target.group.size, target.group.split = size, split
        keys.append(pair_key(drafter))
        assert keys[-1]["backend"] in ("ring", "jaccl", "mpi", "nccl")
    target.ranks = Alone()
    keys.append(pair_key(drafter))
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == 4
