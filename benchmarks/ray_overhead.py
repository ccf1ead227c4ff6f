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
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

_VALUES = {1: 32, 16: 8, 64: 4}  # in a round, by their size in MB
_ROUNDS = 12  # of which the first two warm up
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

    Values are sent ahead of who reads them, as a stage sends its microbatches, or each
    when the one before has arrived. The transfer server alone gets as many: ahead they
    are offered before the clock starts and read at once; in turn a plain socket says
    that one is there, and that it has arrived.
    """

    megabytes: int
    is_ahead: bool
    ours: float
    server_alone: float

    def __str__(self) -> str:
        way = "sent ahead" if self.is_ahead else "one by one"
        alone = f"the transfer server alone gives, {self.server_alone / 1e9:.2f} GB/s"
        share = self.ours / self.server_alone
        rate = f"{self.ours / 1e9:.2f} GB/s"
        return f"{self.megabytes} MB {way}: {rate}, {share:.0%} of what {alone}"


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
        from autopar.runtime.ray_job import Crossing
        from autopar.runtime.ray_programs import sharding_of

        problems = self._transport.connect(group, {1 - group: peer}, _refuse)
        assert not problems, f"the transfer server is to be measured: {problems}"
        crossing, self._arrays = {}, {}
        for megabytes in _VALUES:
            shape = (len(jax.devices()), megabytes * (1 << 18) // len(jax.devices()))
            type_ = ShardedType(
                shape, "float32", ("x",), (len(jax.devices()),), (("x",), ())
            )
            crossing[str(megabytes), 1] = Crossing(type_, type_, (0,), (1,))
            numbers = np.ones(shape, np.float32)
            self._arrays[megabytes] = jax.device_put(numbers, sharding_of(type_))
        self._transport.plan(0, crossing)
        self._transport.use(0)

    def send(self, megabytes: int, is_ahead: bool) -> float:
        """Send values, all at once or each when the one before has arrived.

        Returns when it began, on the clock of the machine, as all others do.
        """
        from autopar.runtime.instructions import Value

        start = perf_counter()
        for i in range(_VALUES[megabytes]):
            value = Value(str(megabytes), i)
            self._transport.send(value, 0, 1, self._arrays[megabytes])
            if not is_ahead:
                self._transport.wait_for_readers()
        self._transport.wait_for_readers()
        return start

    def receive(self, megabytes: int) -> float:
        """Take them; when the last one was there."""
        from autopar.runtime.instructions import Value

        for i in range(_VALUES[megabytes]):
            value = Value(str(megabytes), i)
            self._transport.receive(value, 0, 1).block_until_ready()
        return perf_counter()

    def serve_bare(self) -> tuple[str, tuple[str, int]]:
        """Start a transfer server by itself, and a socket; both addresses."""
        self._server, self._numbers = _server(), itertools.count()
        self._listener = socket.create_server(("127.0.0.1", 0))
        return self._server.address(), self._listener.getsockname()

    def connect_bare(self, address: str, plain: tuple[str, int]) -> None:
        """Connect to both."""
        self._server = _server()
        self._connection = self._server.connect(address)
        self._socket = _at_once(socket.create_connection(plain))

    def accept_bare(self) -> None:
        """Take the other end's socket."""
        self._socket = _at_once(self._listener.accept()[0])

    def offer_bare(self, megabytes: int) -> list[int]:
        """Offer values to the transfer server itself; their numbers."""
        numbers = list(itertools.islice(self._numbers, _VALUES[megabytes]))
        for number in numbers:
            self._server.await_pull(number, [self._arrays[megabytes]])
        return numbers

    def pull_bare(self, megabytes: int, numbers: Sequence[int]) -> float:
        """The seconds that all took, read at once."""
        start = perf_counter()
        found = [self._pulled(megabytes, number) for number in numbers]
        for each in found:
            each.block_until_ready()
        return perf_counter() - start

    def offer_bare_in_turn(self, megabytes: int) -> float:
        """Offer each value when the one before has arrived; when it began."""
        start = perf_counter()
        for number in itertools.islice(self._numbers, _VALUES[megabytes]):
            self._server.await_pull(number, [self._arrays[megabytes]])
            self._socket.sendall(number.to_bytes(8, "little"))
            self._socket.recv(1)
        return start

    def pull_bare_in_turn(self, megabytes: int) -> float:
        """Take each when it is offered; when the last one was there."""
        for _ in range(_VALUES[megabytes]):
            told = self._socket.recv(8, socket.MSG_WAITALL)
            number = int.from_bytes(told, "little")
            self._pulled(megabytes, number).block_until_ready()
            self._socket.sendall(b".")
        return perf_counter()

    def _pulled(self, megabytes: int, number: int) -> Any:
        import jax

        array = self._arrays[megabytes]
        kind = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return self._connection.pull(number, [kind])[0]


def _refuse(_: int, number: int) -> Any:
    raise AssertionError(f"value {number} is pulled from the transfer server")


def _at_once(end: socket.socket) -> socket.socket:
    """A socket that holds no small message back."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


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
    addresses = ray.get(ends[0].serve_bare.remote())
    ray.get(ends[1].connect_bare.remote(*addresses))
    ray.get(ends[0].accept_bare.remote())

    def between(reading: Any, sending: Any) -> float:
        """Seconds from when the first value is sent until the last is there."""
        end, start = ray.get([reading, sending])
        return end - start

    def ours(megabytes: int, is_ahead: bool) -> float:
        reading = ends[1].receive.remote(megabytes)
        return between(reading, ends[0].send.remote(megabytes, is_ahead))

    def bare(megabytes: int, is_ahead: bool) -> float:
        if is_ahead:
            numbers = ray.get(ends[0].offer_bare.remote(megabytes))
            return ray.get(ends[1].pull_bare.remote(megabytes, numbers))
        reading = ends[1].pull_bare_in_turn.remote(megabytes)
        return between(reading, ends[0].offer_bare_in_turn.remote(megabytes))

    rates = []
    for megabytes, is_ahead in itertools.product(_VALUES, (True, False)):
        seconds = [
            (ours(megabytes, is_ahead), bare(megabytes, is_ahead))
            for _ in range(_ROUNDS)  # in turn: the load of the machine changes
        ]
        sent = _VALUES[megabytes] * megabytes << 20
        medians = (sent / statistics.median(x) for x in zip(*seconds[2:], strict=True))
        rates.append(TransferRate(megabytes, is_ahead, *medians))
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
