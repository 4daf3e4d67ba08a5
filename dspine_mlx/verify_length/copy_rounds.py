"""Rounds with copies: what the policy offers in them, and what it books for them."""

import math
from typing import TYPE_CHECKING

from dspine_mlx.round.lookup import Copy, Lookup
from dspine_mlx.round.select import Draft
from dspine_mlx.verify_length.chances import expected_tokens
from dspine_mlx.verify_length.copying import Values
from dspine_mlx.verify_length.records import Round

if TYPE_CHECKING:
    from dspine_mlx.verify_length.auto import Auto

FADING = 1 / 16  # of earlier rounds' tokens and seconds


def splice(auto: "Auto", draft: Draft, lookup: Lookup, limit: int, depth: int) -> Copy | None:
    """The copy that gains most over a draft whose evidence is there, after some of its tokens. Of a
    sampled draft only the greedy path is asked."""
    assert draft.evidence is not None
    greedy = auto.chances.of(auto.read(draft).greedy)
    path = (draft.greedy_path or draft.evidence).tokens.tolist()[:limit]
    w = auto.seconds_saved(greedy, limit, depth)
    w += [1 / auto.rate(depth)] * (limit - len(w))
    copies = lookup.splices(path) if draft.q is None else lookup.whole()
    values = Values(auto.costs.verify(depth), w)
    offer = auto.copying.instead_of_path(greedy[:limit], path, copies, values)
    if offer is None:
        return None
    auto.newest = Round.of_copy(offer, depth, drafted=True)
    return offer.copy


def extend(auto: "Auto", draft: Draft, lookup: Lookup, limit: int, depth: int) -> Copy | None:
    """The copy to offer behind a sampled draft that is offered whole; its tokens may decide."""
    this, drafted = auto.newest, draft.tokens.tolist()
    copy = lookup.draft(limit - len(drafted), drafted)
    if this is None or not this.chances or copy is None:
        return None
    values = Values(auto.costs.verify(depth)[len(drafted) :], [1 / auto.rate(depth)] * limit)
    chances, more = auto.copying.behind(copy, math.prod(this.chances), values)
    if not more:
        return None
    this.go_on(copy, chances, more)
    return copy


def start(auto: "Auto", copy: Copy, limit: int, depth: int) -> int:
    """Start a round with a copy, and return how many tokens it offers. One with nothing drafted was
    found worth it before its last tokens were yielded: other texts may have had rounds since."""
    this = auto.newest
    if this is None or this.copy is not copy:
        auto.digest()
        average = auto.costs.plain(depth) if auto.parked else 1 / auto.rate(depth)
        offer = auto.copying.alone(copy, auto.costs.verify(depth), average)
        this = auto.newest = Round.of_copy(offer, depth, drafted=False)
    this.begun = auto.clock()
    return min(this.chosen, limit)


def learn(auto: "Auto", this: Round) -> None:
    """A round with a copy is over. The drafter answers for its own tokens, if it was asked."""
    depth, plain, took = this.depth, auto.costs.plain(this.depth), this.seconds(auto.costs)
    if this.drafted:
        own = this.copied or 0
        gain = 1 + min(this.accepted, own) - auto.costs.round(own, depth) / plain
        auto.budget.round_over(gain)
    auto.probe, auto.last, auto.late = None, 0.0, 0  # none goes on across the round
    if not auto.parked:
        auto.count(expected_tokens(this.chances[: this.offered]), took, fading=FADING)
    auto.end_round(this, 1 + this.accepted - took / plain)
