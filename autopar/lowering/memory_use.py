"""What a compiled program holds on one device."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device while a compiled program runs.

    Backends differ in what they call the peak (the CPU leaves temporaries out), so it
    is summed here from what they agree on.

    Args:
      argument_bytes: the program's arguments.
      output_bytes: its results.
      temp_bytes: what it needs besides.
      alias_bytes: results that reuse the memory of donated arguments.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @classmethod
    def of(cls, compiled: Any, host_bytes: int = 0) -> "MemoryUse":
        """Asks the compiler of a `jax.stages.Compiled`, or of a target's program.

        `host_bytes` of the arguments, and of the results that take their memory, are
        the host's. A backend whose devices share it counts them among its own.

        Raises:
          ValueError: if the backend does not say.
        """
        stats = compiled.memory_analysis()
        if stats is None:
            raise ValueError(
                "The memory of a compiled program must be known, but this backend "
                "returned no `memory_analysis()`; audit without `memory`."
            )
        shared = 0 if stats.host_argument_size_in_bytes else host_bytes
        return cls(
            int(stats.argument_size_in_bytes) - shared,
            int(stats.output_size_in_bytes),
            int(stats.temp_size_in_bytes),
            int(stats.alias_size_in_bytes),
        )

    @property
    def device_bytes(self) -> int:
        """All of it: arguments, results and temporaries, donated memory once."""
        used = self.argument_bytes + self.output_bytes + self.temp_bytes
        return used - self.alias_bytes

    def __str__(self) -> str:
        return (
            f"{self.device_bytes:,} B a device = {self.argument_bytes:,} argument "
            f"+ {self.output_bytes:,} output + {self.temp_bytes:,} temp "
            f"- {self.alias_bytes:,} alias"
        )
