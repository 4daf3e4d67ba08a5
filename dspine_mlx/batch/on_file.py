"""Files of what steps of several texts cost, in the cache folder."""

from collections.abc import Iterator
from dataclasses import dataclass

from dspine_mlx.batch.costs import BatchCurve
from dspine_mlx.batch.profile import contradiction
from dspine_mlx.cache_folder import reading
from dspine_mlx.errors import InputError
from dspine_mlx.verify_length.on_file import (
    UNREADABLE,
    OnFile,
    days_old,
    files,
    other_machine,
    pair_name,
)


@dataclass(frozen=True)
class BatchCostsOnFile(OnFile):
    device: str = ""
    mlx: str = ""
    curves: tuple[BatchCurve, ...] = ()


def batch_costs_on_file() -> Iterator[BatchCostsOnFile]:
    for path in files("batch"):
        try:
            with reading(path) as data:
                pair = pair_name(data)
                curves = [BatchCurve.from_dict(one) for one in data["curves"]]
                device, version = str(data["key"]["device"]), str(data["key"]["mlx"])
        except InputError:
            yield BatchCostsOnFile(path.name, days_old(path), "unknown pair", UNREADABLE)
            continue
        problem = other_machine(device, version) or contradiction(curves)
        about = path.name, days_old(path), pair, problem
        yield BatchCostsOnFile(*about, device, version, tuple(curves))
