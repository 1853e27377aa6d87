"""Where in a slab the next landing goes: first fit with coalescing. Pure; runs in the slab owner's API process."""

from bisect import insort


class FirstFit:
    """Free ranges of `size` bytes, kept sorted and merged. All lengths are multiples of `unit`."""

    def __init__(self, size: int, unit: int) -> None:
        self._unit = unit
        self.size = size // unit * unit
        self._free: list[tuple[int, int]] = [(0, self.size)] if self.size else []
        self._taken: dict[int, int] = {}

    def rounded(self, length: int) -> int:
        """Bytes that a piece of `length` bytes really takes."""
        return -(-length // self._unit) * self._unit

    @property
    def in_use(self) -> int:
        """Bytes taken now."""
        return sum(self._taken.values())

    @property
    def free_ranges(self) -> tuple[tuple[int, int], ...]:
        """Offset and length of every free range, in order; no two touch."""
        return tuple(self._free)

    def take(self, length: int) -> int | None:
        """Offset of a piece of at least `length` > 0 bytes, from the first range that holds it; None without one."""
        need = self.rounded(length)
        for index, (start, room) in enumerate(self._free):
            if need <= room:
                self._free[index : index + 1] = [(start + need, room - need)] if need < room else []
                self._taken[start] = need
                return start
        return None

    def give(self, offset: int) -> None:
        """Give the piece at `offset` back and merge it with its free neighbours.

        Raises:
            KeyError: no piece begins there.
        """
        length = self._taken.pop(offset)
        insort(self._free, (offset, length))
        index = self._free.index((offset, length))
        for left in (index, index - 1):
            if 0 <= left < len(self._free) - 1:
                (start, room), (after, more) = self._free[left], self._free[left + 1]
                if start + room == after:
                    self._free[left : left + 2] = [(start, room + more)]
