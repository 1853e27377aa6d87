"""Parts are decoded ahead of their turn as long as they fit beside each other, and come in their order."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from shared_runtime.conditioning import decode_ahead
from shared_runtime.conditioning.decode_ahead import DecodeAhead, Part, Progress


@pytest.fixture
def no_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_ahead, "SMALL_BYTES", 0)


class Decoder:
    """Parts that are really decoded on threads, and what of them is held."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._lock = threading.Lock()
        self.held: dict[int, int] = {}
        self.most = 0
        self.begun: list[int] = []
        self.parts = [Part(size, self._part(number, size)) for number, size in enumerate(sizes)]

    def _part(self, number: int, size: int) -> Callable[[Progress], int]:
        def decode(progress: Progress) -> int:
            with self._lock:
                self.begun.append(number)
                self.held[number] = size
                self.most = max(self.most, sum(self.held.values()))
            time.sleep(0.01)
            progress.one()
            return number

        return decode

    def take_all(self) -> list[int]:
        taken = []
        with DecodeAhead(self.parts) as ahead:
            for _ in self.parts:
                taken.append(ahead.take(lambda: None))
                time.sleep(0.01)
                with self._lock:
                    del self.held[taken[-1]]
        return taken


@pytest.mark.usefixtures("no_small_files")
@pytest.mark.parametrize(
    "sizes", [(60, 50, 40), (10, 10, 100, 10, 10), (5,) * 9, (100, 1, 1, 1), (1, 1, 1, 100), (7, 0, 0, 7, 3, 4)]
)
def test_no_more_is_held_than_the_largest_takes(sizes: tuple[int, ...]) -> None:
    decoder = Decoder(sizes)
    assert decoder.take_all() == list(range(len(sizes)))
    assert decoder.most == max(sizes)


@pytest.mark.usefixtures("no_small_files")
def test_a_large_one_waits_until_those_before_it_are_let_go_of_and_small_ones_do_not() -> None:
    decoder = Decoder((30, 60, 10, 100))
    with DecodeAhead(decoder.parts) as ahead:
        ahead.take(lambda: None)
        ahead.take(lambda: None)
        ahead.take(lambda: None)
        assert sorted(decoder.begun) == [0, 1, 2]
        assert ahead.take(lambda: None) == 3


def test_small_files_are_decoded_beside_each_other_whatever_the_largest_is() -> None:
    together = threading.Barrier(4, timeout=20)

    def decode(_: Progress) -> int:
        return together.wait()

    with DecodeAhead([Part(1000, decode)] * 4) as ahead:
        assert sorted(ahead.take(lambda: None) for _ in range(4)) == [0, 1, 2, 3]


@pytest.mark.steady
def test_nothing_is_decoded_any_more_when_it_is_over() -> None:
    decoding = threading.Event()

    def decode(progress: Progress) -> None:
        while True:
            decoding.set()
            progress.one()
            time.sleep(0.001)

    with DecodeAhead([Part(1, decode)]):
        assert decoding.wait(20)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("media")]
