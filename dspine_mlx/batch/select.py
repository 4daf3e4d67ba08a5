"""Drafts of several texts: one walk for all whose tables it can serve."""

import mlx.core as mx

from dspine_mlx.batch.text import BatchText
from dspine_mlx.drafters.proposal import Proposal, SlotwiseProposal
from dspine_mlx.drafters.proposals import Proposals
from dspine_mlx.metal.kernel import Kernels
from dspine_mlx.round.select import Draft, Evidence, few, tokens_on


def select_texts(
    texts: list[BatchText], proposals: Proposals, kernels: Kernels, with_evidence: bool
) -> list[Draft]:
    """A draft per text, as `dspine_mlx.round.select.select` picks it.

    Greedy and tempered texts share a walk, which has a temperature per text. One that truncates or
    foresees has scores of its own, and is walked by itself. Nothing is evaluated here.
    """
    shares = [proposals.joint is not None and text.draft_temperature is not None for text in texts]
    together: list[Draft] = []
    if proposals.joint is not None and any(shares):
        together = walked(texts, proposals.joint, kernels, with_evidence)
    return [
        together[i] if shared else text.select(proposals[i], with_evidence)
        for i, (text, shared) in enumerate(zip(texts, shares, strict=True))
    ]


def walked(
    texts: list[BatchText],
    joint: Proposal | SlotwiseProposal,
    kernels: Kernels,
    with_evidence: bool,
) -> list[Draft]:
    """Drafts of all texts; those of texts that can't share the walk are greedy."""
    temps = [text.draft_temperature or 0.0 for text in texts]
    if isinstance(joint, SlotwiseProposal):
        if not any(temps):
            return picked(texts, joint, with_evidence)
        joint = joint.ranked()
    drawn, shape = any(temps), joint.candidates.shape
    noises = [mx.broadcast_to(mx.array(0.0), shape)]
    if drawn:
        noises.insert(0, mx.random.gumbel(shape) * mx.array(temps)[:, None, None])
    scale = mx.array([1 / temp if temp else 1.0 for temp in temps])
    walks = joint.paths(noises if with_evidence else noises[:1], scale, None, kernels)
    tokens, (_, q) = tokens_on(joint, walks[0][0]), walks[0]
    known = [known_on(joint, *walk) for walk in walks] if with_evidence else []
    greedy = tokens_on(joint, walks[-1][0])
    drafts = []
    for i, (text, temp) in enumerate(zip(texts, temps, strict=True)):
        draft = Draft(tokens[i], joint.candidates[i], q[i] if temp else None)
        if with_evidence:
            draft = draft._replace(evidence=Evidence(tokens[i], known[0][i], text.text.stops))
        if with_evidence and temp:
            path = Evidence(greedy[i], known[-1][i], text.text.stops)
            draft = draft._replace(greedy_path=path)
        drafts.append(draft)
    return drafts


def picked(texts: list[BatchText], joint: SlotwiseProposal, with_evidence: bool) -> list[Draft]:
    """Greedy drafts of slots that pick on their own: nothing is ranked."""
    tokens = joint.greedy_tokens()
    drafts = [Draft(own, own[:, None], None) for own in tokens]
    if not with_evidence:
        return drafts
    chances = joint.probs() if joint.confidence is None else joint.confidence
    known = zip(texts, drafts, tokens, chances, strict=True)
    return [
        draft._replace(evidence=Evidence(own, chance, text.text.stops))
        for text, draft, own, chance in known
    ]


def known_on(joint: Proposal, path: mx.array, probs: mx.array) -> mx.array:
    """What is known of the chances of all texts' paths [B, M]: [B, M], or [B, M, K]."""
    known = joint.confidence_on(path)
    return few(probs) if known is None else known


def nothing() -> Draft:
    """The draft of a text that is not drafted for."""
    return Draft(mx.zeros((0,), mx.uint32), mx.zeros((0, 1), mx.uint32), None)
