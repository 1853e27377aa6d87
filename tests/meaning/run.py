"""Makes clips through `/v1/videos` on the demo checkpoint, judges each, and prints the table: `make meaning`.

What is judged already is not made again, so that a run that was stopped goes on, and one of a few clips grows into one
of all. `--break` spoils requests or clips on purpose, to see the judge say no.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from shared_runtime.demo import weights
from shared_runtime.demo.scene import BACKGROUNDS, Motion
from shared_runtime.demo.world import frames
from shared_schema.tasks import FPS, SAMPLE_RATE
from tests.meaning.cases import Case, Task, all_cases
from tests.meaning.judge import decode, judge_decoded
from tests.meaning.results import Result, Results
from video_client.client import ClientError, VideoClient, VideoRequest
from video_client.pair import Pair, PairSettings, end_on_term, free_ports
from video_client.scenes import FRAMES, HEIGHT, WIDTH

Breakage = Literal["order", "drop", "text", "sound"]
NEAR = 25.0
"""PSNR that a keyframe's frame has at least, in decibel."""
NEAR_THING, SEEN = 15.0, 30
"""The same of the thing's own pixels, those that differ from the background by so many levels. Without it: 8 dB."""
LEAP = 0.15
"""Short edges that a thing may move from one frame to the next at most; the fastest one moves 0.03, a bounce 0.09."""
READY_S, CLIP_S = 240.0, 300.0


class Maker(Protocol):
    """Whoever makes the clip of a case."""

    def make(self, case: Case, clip: Path) -> None:
        """Write it.

        Raises:
            ClientError: it was not made.
        """


class ServedMaker:
    """The pair, through its public API."""

    def __init__(self, client: VideoClient, inputs: Path, sigma_points: int | None, breakage: Breakage | None) -> None:
        self._client, self._inputs, self._points, self._breakage = client, inputs, sigma_points, breakage

    def make(self, case: Case, clip: Path) -> None:
        """See `Maker`."""
        video = self._client.wait(self._client.create(self.request(case)).id, timeout_s=CLIP_S)
        if video.status != "completed":
            raise ClientError(f"{case.name} is {video.status}: {video.error.message if video.error else ''}")
        self._client.download(video.id, clip)

    def request(self, case: Case) -> VideoRequest:
        """What is sent of a case."""
        fields = {"seed": str(case.seed), "num_frames": str(FRAMES), "size": f"{WIDTH}x{HEIGHT}"}
        if self._points is not None:
            fields["num_inference_steps"] = str(self._points)
        if self._breakage == "text":
            return VideoRequest(case.prompt, fields, {"task": "t2va"})
        files = case.files(self._inputs)
        if self._breakage == "order":
            files = files[::-1]
        if self._breakage == "drop" and case.task == "ref2va":
            files = files[1:]
        extra: dict[str, object] = {"task": case.task}
        if case.task == "fl2va":
            extra["frame_indices"] = [0 if each.kind == "first" else -1 for each in case.media]
        return VideoRequest(case.prompt, fields, extra, files)


def judged(case: Case, pictures: NDArray[np.uint8], waveform: NDArray[np.float32], seconds: float) -> Result:
    """A clip against its case."""
    judgement = judge_decoded(pictures, waveform)
    agreed = {**judgement.agrees(case.scene), **_keyframes(case, pictures)}
    agreed["continuous"] = _continuous(judgement.seen.places)
    wanted = [each for each in case.aspects if each != "clicks" or case.scene.motion is Motion.BOUNCE]
    return Result(case.name, case.group, case.task, {aspect: agreed[aspect] for aspect in wanted}, round(seconds, 2))


def _keyframes(case: Case, pictures: NDArray[np.uint8]) -> dict[str, bool]:
    given = frames(case.scene, FRAMES, HEIGHT, WIDTH)
    return {name: _near(pictures[at], given[at], case.scene.background) for name, at in (("first", 0), ("last", -1))}


def _near(made: NDArray[np.uint8], given: NDArray[np.uint8], background: str) -> bool:
    """Whether a frame is like the given one, all over and where the thing is: most of a picture is background."""
    thing = np.abs(given.astype(np.int16) - np.array(BACKGROUNDS[background])).max(-1) > SEEN
    return psnr(made, given) >= NEAR and (not thing.any() or psnr(made[thing], given[thing]) >= NEAR_THING)


def psnr(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """How near two pictures are, in decibel."""
    error = float(np.square(one.astype(np.float64) - other).mean())
    return 10 * float(np.log10(255**2 / max(error, 1e-9)))


def _continuous(places: NDArray[np.floating]) -> bool:
    """Whether the thing never jumps, and never is of another size at once, where it is seen from frame to frame."""
    steps = np.linalg.norm(np.diff(places, axis=0), axis=1)
    seen = steps[~np.isnan(steps)]
    return len(seen) > 0 and float(seen.max()) < LEAP


def late(waveform: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sound two frames late."""
    moved: NDArray[np.float32] = np.roll(waveform, round(2 * SAMPLE_RATE / FPS), axis=1)
    return moved


def run(
    cases: Collection[Case], makers: Sequence[Maker], results: Results, folder: Path, breakage: Breakage | None = None
) -> None:
    """Make and judge what is not in `results` yet, with all makers at once; clips stay in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    done = results.names()
    left, one_at_a_time = deque(case for case in cases if case.name not in done), Lock()

    def work(maker: Maker) -> None:
        while True:
            try:
                case = left.popleft()
            except IndexError:
                return
            result = make_and_judge(case, maker, folder / f"{case.name}.mp4", breakage)
            with one_at_a_time:
                results.add(result)
                print(_told(result), flush=True)

    with ThreadPoolExecutor(len(makers)) as pool:
        working = [pool.submit(work, maker) for maker in makers]
        try:
            wait(working, return_when=FIRST_EXCEPTION)
        finally:
            # Whether a maker failed or Ctrl-C was pressed: what the others are at is their last.
            left.clear()
    for each in working:
        each.result()


def make_and_judge(case: Case, maker: Maker, clip: Path, breakage: Breakage | None) -> Result:
    """One clip, from its request to what is right about it."""
    begun = time.monotonic()
    maker.make(case, clip)
    seconds = time.monotonic() - begun
    pictures, waveform = decode(clip)
    return judged(case, pictures, late(waveform) if breakage == "sound" else waveform, seconds)


def _told(result: Result) -> str:
    wrong = [aspect for aspect, right in result.right.items() if not right]
    return f"{result.name}: {result.seconds:.1f} s, {'wrong: ' + ', '.join(wrong) if wrong else 'right'}"


@contextmanager
def _serving(options: argparse.Namespace) -> Iterator[list[VideoClient]]:
    """Clients of the service that is named, or of as many pairs of their own as are asked for."""
    with ExitStack() as opened:
        urls = [options.url] if options.url else _pairs(opened, options)
        yield [opened.enter_context(VideoClient(url)) for url in urls]


def _pairs(opened: ExitStack, options: argparse.Namespace) -> list[str]:
    """Start pairs, which end with `opened`; the URLs of their public APIs once all are ready."""
    pairs = []
    for number in range(options.pairs):
        encoder_port, port = free_ports(2)
        state = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="minimax-h3-meaning-")))
        logs = options.out / "logs" / str(number)
        settings = PairSettings(options.model, "demo", encoder_port, port, state, lora=options.lora, log_dir=logs)
        pairs.append(opened.enter_context(Pair(settings)))
    for pair in pairs:
        pair.wait_ready(READY_S)
    return [pair.settings.diffusion_url for pair in pairs]


def chosen(cases: Sequence[Case], tasks: Collection[str], lora: str | None, of_group: int | None) -> list[Case]:
    """Those of `tasks` that the adapter `lora` can make, at most so many of each group."""
    wanted = set(tasks)
    if lora is not None:
        # An adapter is for one partition, and the other one's tasks are refused beside it.
        wanted &= {"t2va", "fl2va"} if "_fl2v_" in Path(lora).name else {"ref2va"}
    seen: Counter[str] = Counter()
    found = []
    for case in cases:
        seen[case.group] += 1
        if case.task in wanted and (of_group is None or seen[case.group] <= of_group):
            found.append(case)
    return found


def _made_by(options: argparse.Namespace) -> dict[str, str]:
    folder = weights.CHECKPOINT if options.model == "demo" else options.model
    return {
        "weights": _digest(Path(folder)) if folder else options.url,
        "adapter": _digest(Path(options.lora)) if options.lora else "none",
        "sigma_points": "the adapter's" if options.lora else str(options.sigma_points),
        "seed": str(options.seed),
        "broken": options.breakage or "nothing",
    }


def _digest(path: Path) -> str:
    """Of a file, or of everything in a folder."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return sha256(b"".join(sha256(each.read_bytes()).digest() for each in files)).hexdigest()


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.meaning.run", description="Judge clips of the demo checkpoint.")
    parser.add_argument("--model", help="demo, or a checkpoint's folder; pairs are started on it")
    parser.add_argument("--url", help="a diffusion service that serves it already, in place of --model")
    parser.add_argument("--pairs", type=int, default=1, help="how many to start; each keeps about one core busy")
    parser.add_argument("--lora", help="a Turbo adapter; its own schedule is used")
    parser.add_argument("--without", type=Path, help="results.jsonl of the run without the adapter, to compare with")
    parser.add_argument("--clips", type=int, default=200, help="prompts, and a quarter as many of each other kind")
    parser.add_argument("--tasks", nargs="+", choices=get_args(Task), default=get_args(Task))
    parser.add_argument("--of-group", type=int, help="the first so many of each kind alone")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--sigma-points", type=int, default=9)
    parser.add_argument("--break", dest="breakage", choices=get_args(Breakage))
    parser.add_argument("--out", type=Path, default=Path("meaning"))
    options = parser.parse_args()
    if bool(options.model) == bool(options.url):
        parser.error("give --model or --url")
    return options


def main() -> int:
    """0 when everything holds."""
    options = read_options()
    end_on_term()
    try:
        return judge_all(options)
    except KeyboardInterrupt:
        print("meaning: stopped; the same command goes on", file=sys.stderr)
        return 130


def judge_all(options: argparse.Namespace) -> int:
    """Make and judge what is left, and print the table; 0 when everything holds, 2 where results cannot be kept."""
    try:
        results = Results(options.out / "results.jsonl", _made_by(options))
        without = None if options.without is None else Results.kept(options.without)
    except (OSError, ValueError) as error:
        print(f"meaning: {error}", file=sys.stderr)
        return 2
    points = None if options.lora else options.sigma_points
    cases = chosen(all_cases(options.clips, options.seed), options.tasks, options.lora, options.of_group)
    if {case.name for case in cases} - results.names():
        with _serving(options) as clients:
            makers = [ServedMaker(each, options.out / "inputs", points, options.breakage) for each in clients]
            run(cases, makers, results, options.out / "clips", options.breakage)
    missed = results.missed({case.task for case in cases}) if without is None else without.lost_to(results)
    print(f"\n{results.table(without)}\n")
    print("\n".join(missed) if missed else "everything holds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
