"""Training objectives, one module per method; `Method.objective` names it."""

from pkgutil import resolve_name

from dspine_mlx.drafters import METHODS, method_of
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.train.objectives.dflash import Objective


def objective_named(name: str) -> Objective:
    """The objective of a method; `InputError` lists those that can be trained here."""
    trainable = {method.name: method.objective for method in METHODS.values() if method.objective}
    if name not in trainable:
        raise InputError(f"the method is {name!r}; it must be {', '.join(trainable)}")
    objective: Objective = resolve_name(trainable[name])
    return objective


def objective_of(drafter: Drafter) -> Objective:
    return objective_named(method_of(drafter.network).name)
