"""What tests ask of workers: what they keep, and the bytes that the driver carries."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.lowering.exported_program import ShardedType
from autopar.runtime.ray_workers import Workers


def on_worker(workers: Workers, rank: int, run: Callable[..., Any], *given: Any) -> Any:
    """The result of a function of the `HostWorker` of a host, run there."""
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[run.__module__])
    return ray.get(workers._actors[rank].__ray_call__.remote(run, *given))


def kept_by(workers: Workers) -> list[int]:
    """How many arrays each host keeps, after what is free is freed."""
    freed = workers.freed_by_rank(range(workers.num_groups))
    return [on_worker(workers, rank, _kept, freed[rank]) for rank in sorted(freed)]


def _kept(worker: Any, freed: tuple[int, ...]) -> int:
    worker._free(freed)
    return len(worker._arrays)


def put_in_place_of(workers: Workers, rank: int, number: int, array: Any) -> None:
    """Has a host keep another array under a number."""
    on_worker(workers, rank, _put, number, array)


def _put(worker: Any, number: int, array: Any) -> None:
    import jax

    old = worker._arrays[number]
    worker._arrays[number] = jax.device_put(array, old.sharding)


@dataclass
class Traffic:
    """Bytes of arrays that passed through the driver, and the largest of them."""

    to_hosts: int = 0
    from_hosts: int = 0
    largest_array: int = 0

    def count(self, what: Any, is_sent: bool) -> None:
        for nbytes in _array_bytes(what):
            self.largest_array = max(self.largest_array, nbytes)
            self.to_hosts += nbytes if is_sent else 0
            self.from_hosts += 0 if is_sent else nbytes


def traffic_of(workers: Any) -> Traffic:
    """What passes through the driver from when this is asked for first."""
    if "counted_traffic" not in vars(workers):
        begin, traffic = workers.begin, Traffic()

        def counting(method: str, arguments: Any, seconds: Any = None) -> Any:
            traffic.count([*arguments.values()], is_sent=True)
            finish = begin(method, arguments, seconds)

            def counted() -> Any:
                replies = finish()
                traffic.count(replies, is_sent=False)
                return replies

            return counted

        workers.begin, workers.counted_traffic = counting, traffic
    return workers.counted_traffic


def _array_bytes(value: Any) -> list[int]:
    """The sizes of the arrays in what is sent or returned."""
    if isinstance(value, Mapping):
        return [n for each in value.values() for n in _array_bytes(each)]
    if isinstance(value, tuple | list):
        return [n for each in value for n in _array_bytes(each)]
    if hasattr(value, "nbytes") and not isinstance(value, ShardedType):
        return [value.nbytes]
    if hasattr(value, "__dataclass_fields__"):
        return [n for each in vars(value).values() for n in _array_bytes(each)]
    return []
