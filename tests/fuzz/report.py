"""Prints what the last `make fuzz` covered: `python -m tests.fuzz.report`."""

from tests import conftest

assert conftest  # imported before jax, which reads its environment once

from tests.fuzz.record import RECORDS, Record  # noqa: E402

if __name__ == "__main__":
    print(Record.load(RECORDS))
