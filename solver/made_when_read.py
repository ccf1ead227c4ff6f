"""A sequence whose items are made from arrays whenever they are looked at."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class MadeWhenRead(Sequence[Item]):
    """What has a million items that few look at need not have a million objects."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """The item at an index that is in range."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return tuple(map(self.item, places))
        return self.item(places)

    def __iter__(self) -> Iterator[Item]:
        return map(self.item, range(len(self)))
