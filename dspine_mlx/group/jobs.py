"""What rank 0 asks of the others between its texts."""

from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.cache_folder import cache_folder
from dspine_mlx.group.follow import Followed, Follower
from dspine_mlx.group.in_step import decode_job
from dspine_mlx.group.target import PartOfTarget
from dspine_mlx.group.watchdog import LOADING
from dspine_mlx.load import same_random_state
from dspine_mlx.round.text import Checkpoints
from dspine_mlx.target.row_kernels import prepare
from dspine_mlx.target.turns import Turns


class Jobs:
    """A rank's answers to rank 0's jobs, one after another."""

    def __init__(self, target: PartOfTarget, tokenizer: TokenizerWrapper):
        self.target, self.tokenizer = target, tokenizer
        self.turns: Turns | None = None  # of a chat
        self.checkpoints: Checkpoints = {}  # of its next answer

    def run(self) -> dict[str, Any]:
        """Do what rank 0 says, until it says that it is done; returns how it says so. Before it
        says anything it may load a drafter, or download one."""
        job = self.target.channel.receive(LOADING)
        while job["do"] != "done":
            self.do(job)
            job = self.target.channel.receive()
        return job

    def do(self, job: dict[str, Any]) -> None:
        model = self.target.model
        if job["do"] == "text" and self.turns is not None:
            followed = self.text(job, self.turns.cache, self.checkpoints)
            self.turns.tokens += followed.tokens
        elif job["do"] == "text":
            self.text(job, make_prompt_cache(model, job["max_kv_size"]))
        elif job["do"] == "reset":
            self.turns = Turns(model, job["max_kv_size"])
        elif job["do"] == "turn" and self.turns is not None:
            new = self.turns.go_back(job["tokens"])
            self.checkpoints = self.turns.checkpoints(new, job["stops"])
        elif job["do"] == "kernels":
            widths = range(2, job["proposals"] + 2)
            with same_random_state():
                found = prepare(self.target, job["mode"], widths, cache_folder())
            self.target.verify_kernels = found
        elif job["do"] == "caches":
            self.target.verify_kernels.race_caches(job["bits"], job["group_size"])
        elif job["do"] == "plain":
            for _ in decode_job(model, self.tokenizer, job):
                pass

    def text(
        self, job: dict[str, Any], cache: list[Any], checkpoints: Checkpoints | None = None
    ) -> Followed:
        return Follower(self.target, job, cache, checkpoints).run()
