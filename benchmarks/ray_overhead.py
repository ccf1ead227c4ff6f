"""What two hosts of a local Ray cluster cost beside what they compute.

Measures the driver's CPU time in a step, transfers between stages beside what JAX's
transfer server alone gives in the same run, and how long a training takes to go on
when one of its hosts is killed. Hosts are processes of this machine with four virtual
devices each; nothing here says what a network or an accelerator gives.

    python -m benchmarks.ray_overhead --steps 50
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

_MEGABYTES = (1, 16, 64)
_ROUNDS, _REPEATS = 8, 4  # the first two of a round warm up
_SECRET = b"one run"


@dataclass(frozen=True)
class DriverTime:
    """Medians of a form of a step: seconds by the clock, and the driver's of CPU."""

    name: str
    step_seconds: float
    driver_cpu_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.step_seconds * 1e3:.1f} ms a step, of which the "
            f"driver computes {self.driver_cpu_seconds * 1e3:.1f} ms"
        )


@dataclass(frozen=True)
class TransferRate:
    """Bytes per second of values of one size, over the transport and without it.

    Values are offered `ahead` of who reads them, as a stage sends its microbatches, or
    each when the one before has arrived; to the transfer server alone ahead.
    """

    megabytes: int
    ahead: float
    one_by_one: float
    server_alone: float

    def __str__(self) -> str:
        ours = ("sent ahead", self.ahead), ("one by one", self.one_by_one)
        parts = (
            f"{n} {x / 1e9:.2f} GB/s, {x / self.server_alone:.0%}" for n, x in ours
        )
        alone = f"the transfer server alone gives, {self.server_alone / 1e9:.2f} GB/s"
        return f"{self.megabytes} MB: {'; '.join(parts)} of what {alone}"


def driver_times(cluster: Any, num_steps: int) -> list[DriverTime]:
    """Steps of one program and of two stages, each with two ways of its batches."""
    import jax

    import autopar

    from .models import build

    workload = build("mlp")
    batch, found = workload.make_batch(0), []
    methods: dict[str, Any] = {
        "one program": autopar.ShardParallel(),
        "two stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    }
    for name, method in methods.items():
        step = autopar.parallelize(workload.step, method=method, cluster=cluster)
        state = step.init(workload.init, jax.random.key(0), batch=batch)
        lowered = step.lower(state, batch)
        sources = {
            f"{name}, batches from the driver": itertools.repeat(batch),
            f"{name}, read by the hosts": autopar.Batches(
                batch, lowered, on_hosts=True
            ),
        }
        for form, batches in sources.items():
            clock, cpu = [], []
            for given in itertools.islice(batches, num_steps + 3):  # three warm up
                start = perf_counter(), time.process_time()
                state, _ = step(state, given)
                clock.append(perf_counter() - start[0])
                cpu.append(time.process_time() - start[1])
            medians = statistics.median(clock[3:]), statistics.median(cpu[3:])
            found.append(DriverTime(form, *medians))
        step.close()
    return found


class TransferEnd:
    """One end of transfers, in a process of its own."""

    def __init__(self, num_devices: int) -> None:
        from autopar.clusters.virtual_devices import use_virtual_devices

        use_virtual_devices(num_devices)
        from autopar.runtime.ray_transport import Transport

        self._transport = Transport("127.0.0.1", _SECRET)

    def address(self) -> tuple[str, int]:
        """Where the other end connects to."""
        return self._transport.control_address

    def connect(self, group: int, peer: tuple[str, int]) -> None:
        """Both ends do so at once."""
        import jax
        import numpy as np

        from autopar.lowering.exported_program import ShardedType
        from autopar.runtime.ray_crossing import Crossing
        from autopar.runtime.ray_programs import sharding_of
        from autopar.runtime.ray_transport import Peer

        problems = self._transport.connect(group, {1 - group: Peer(peer, _refuse)})
        assert not problems, f"the transfer server is to be measured: {problems}"
        crossing, self._arrays = {}, {}
        for megabytes in _MEGABYTES:
            shape = (len(jax.devices()), megabytes * (1 << 18) // len(jax.devices()))
            type_ = ShardedType(
                shape, "float32", ("x",), (len(jax.devices()),), (("x",), ())
            )
            crossing[str(megabytes), 1] = Crossing(type_, type_, (0,), (1,))
            numbers = np.ones(shape, np.float32)
            self._arrays[megabytes] = jax.device_put(numbers, sharding_of(type_))
        self._transport.plan(0, crossing)
        self._transport.use(0)

    def send(self, megabytes: int, is_ahead: bool) -> None:
        """Send values, all at once or each when the one before has arrived."""
        from autopar.runtime.instructions import Value

        for i in range(_ROUNDS):
            value = Value(str(megabytes), i)
            self._transport.send(value, 0, 1, self._arrays[megabytes])
            if not is_ahead:
                self._transport.wait_for_readers()
        self._transport.wait_for_readers()

    def receive(self, megabytes: int) -> list[float]:
        """The seconds that each value took."""
        from autopar.runtime.instructions import Value

        def pull(i: int) -> Any:
            return self._transport.receive(Value(str(megabytes), i), 0, 1)

        return _timed(pull)

    def serve_bare(self) -> str:
        """Start a transfer server without the transport; its address."""
        self._server, self._numbers = _server(), itertools.count()
        return self._server.address()

    def connect_bare(self, address: str) -> None:
        """Connect to one."""
        self._server = _server()
        self._connection = self._server.connect(address)

    def offer_bare(self, megabytes: int) -> list[int]:
        """Offer values to the transfer server itself; their numbers."""
        numbers = list(itertools.islice(self._numbers, _ROUNDS))
        for number in numbers:
            self._server.await_pull(number, [self._arrays[megabytes]])
        return numbers

    def pull_bare(self, megabytes: int, numbers: Sequence[int]) -> list[float]:
        """The seconds that each value took."""
        import jax

        array = self._arrays[megabytes]
        kind = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return _timed(lambda i: self._connection.pull(numbers[i], [kind])[0])


def _refuse(number: int) -> Any:
    raise AssertionError(f"value {number} is pulled from the transfer server")


def _server() -> Any:
    """A transfer server with the transport's settings."""
    import jax
    from jax.experimental import transfer

    from autopar.runtime.ray_transport import NUM_STREAMS, TRANSFER_BYTES

    return transfer.start_transfer_server(
        jax.devices()[0].client,
        "127.0.0.1:0",
        ["127.0.0.1:0"] * NUM_STREAMS,
        transfer_size=TRANSFER_BYTES,
    )


def _timed(pull: Callable[[int], Any]) -> list[float]:
    seconds = []
    for i in range(_ROUNDS):
        start = perf_counter()
        pull(i).block_until_ready()
        seconds.append(perf_counter() - start)
    return seconds[2:]


def transfer_rates() -> list[TransferRate]:
    """Transfers between two processes of the Ray cluster that this one is in."""
    import ray

    end: Any = ray.remote(TransferEnd)
    ends = [
        end.options(num_cpus=0.01, runtime_env={"env_vars": {"NPROC": "8"}}).remote(4)
        for _ in range(2)
    ]
    first, second = ray.get([each.address.remote() for each in ends])
    ray.get([ends[0].connect.remote(0, second), ends[1].connect.remote(1, first)])
    address = ray.get(ends[0].serve_bare.remote())
    ray.get(ends[1].connect_bare.remote(address))

    def ours(megabytes: int, is_ahead: bool) -> list[float]:
        sent = ends[0].send.remote(megabytes, is_ahead)
        seconds = ray.get(ends[1].receive.remote(megabytes))
        ray.get(sent)
        return seconds

    def bare(megabytes: int) -> list[float]:
        numbers = ray.get(ends[0].offer_bare.remote(megabytes))
        return ray.get(ends[1].pull_bare.remote(megabytes, numbers))

    rates = []
    for megabytes in _MEGABYTES:
        seconds: list[list[float]] = [[], [], []]
        for _ in range(_REPEATS):  # in turn: the load of the machine changes
            seconds[0] += ours(megabytes, is_ahead=True)
            seconds[1] += ours(megabytes, is_ahead=False)
            seconds[2] += bare(megabytes)
        medians = ((megabytes << 20) / statistics.median(each) for each in seconds)
        rates.append(TransferRate(megabytes, *medians))
    for each in ends:
        ray.kill(each)
    return rates


def host_recovery(hosts: Any) -> Any:
    """A training whose second host is killed: what its `Recovery` says."""
    import jax

    import autopar

    from .faults import FaultInjection, FaultyBatches
    from .models import build

    workload, second = build("mlp"), hosts.add()
    none = FaultInjection.of_none(workload)
    cluster = autopar.Cluster.ray(hosts.address, num_hosts=2)
    step = autopar.parallelize(workload.step, cluster=cluster)
    with (
        tempfile.TemporaryDirectory() as folder,
        autopar.Checkpoints(folder) as checkpoints,
    ):
        training = autopar.Training(
            *(step, checkpoints, workload.init, jax.random.key(0)),
            batches=lambda position: FaultyBatches(position, none),
            save_every=2,
        )
        for number, _ in training.run(8):
            if number == 4 and not training.recoveries:
                threading.Thread(target=hosts.kill, args=(second,)).start()
        training.step.close()
    return training.recoveries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--transfers", action="store_true", help="measure these only")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices
    from autopar.runtime.ray_local import local_ray_hosts

    use_virtual_devices(8)
    import autopar

    with local_ray_hosts(2, 4) as hosts:
        cluster = autopar.Cluster.ray(hosts.address)
        if not arguments.transfers:
            for each in driver_times(cluster, arguments.steps):
                print(each, flush=True)
        for rate in transfer_rates():
            print(rate, flush=True)
    if arguments.transfers:
        return
    with local_ray_hosts(1, 4) as hosts:
        for recovery in host_recovery(hosts):
            print(recovery)


if __name__ == "__main__":
    main()
