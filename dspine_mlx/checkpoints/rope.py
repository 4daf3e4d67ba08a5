"""A drafter's rope theta: if config.json leaves it out, no tensor's shape shows it."""

from typing import Any


def states_rope_theta(config: Any) -> bool:
    """Whether a config, or any section of it, has a rope theta."""
    if not isinstance(config, dict):
        return False
    return config.get("rope_theta") is not None or any(map(states_rope_theta, config.values()))


def assumed_rope_theta(theta: float) -> str:
    return (
        f"config.json has no rope_theta, {theta:g} is assumed; if next to nothing is accepted, add "
        "the one that the drafter was trained with, often the target's"
    )
