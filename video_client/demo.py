"""`make demo`: starts both services on a small checkpoint, makes a clip of each task, checks, lists and shows them."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion_service.mux import ClipFacts, check_clip
from shared_schema.errors import JobFailed
from shared_schema.tasks import AUDIO_CHANNELS, FPS, SAMPLE_RATE
from shared_schema.videos import Video
from video_client import contact_sheet
from video_client.client import ClientError, VideoClient, VideoRequest
from video_client.pair import Pair, PairSettings, ServiceEnded, end_on_term, free_ports
from video_client.progress import ProgressBar
from video_client.samples import Samples, make_samples
from video_client.scenes import world_requests

AAC_FRAME_SECONDS = 1024 / SAMPLE_RATE
READY_SECONDS = 240.0
CLIP_SECONDS = 240.0
PART_OF_ENCODE = "encode_"
"""Stages inside the stage `encode`: in the report, not in the table."""
SHEET = "contact_sheet.jpg"

BEFORE = {
    "demo": """\
Both services start on the demo checkpoint, which was trained on a little world of shapes that move and sound: one
clip from words, one between two frames, one with the thing of a picture and the motion of a video. It takes a minute.
""",
    "tiny": """\
Both services start on a checkpoint of random tiny weights, so the clips are colourful noise by design: what you
see is that every step works, from your files to MP4s with sound. It takes a minute or two.
""",
}
AFTER = {
    "demo": """\
To ask it yourself, or to serve the real model:
    make serve MODEL=demo
    make serve MODEL=MiniMaxAI/MiniMax-H3   (README.md, "The real model": which GPUs, which settings)
and then, in another terminal:
    .venv/bin/python -m video_client create "A blue disc sinks slowly on a white background, with a low tone." \\
        --seconds 4 --wait --output clip.mp4
""",
    "tiny": """\
Random tiny weights make noise; that is all they can do. To serve the real model:
    make serve MODEL=MiniMaxAI/MiniMax-H3   (README.md, "The real model": which GPUs, which settings)
and then, in another terminal:
    .venv/bin/python -m video_client create "a red ball rolls over grass" --wait --output clip.mp4
""",
}


class DemoFailed(Exception):
    """A clip is not what it must be. `str(error)` says how."""


@dataclass(frozen=True)
class Clip:
    """One finished clip: the job as the service reports it, and what its file holds."""

    path: Path
    video: Video
    facts: ClipFacts

    def record(self) -> dict[str, object]:
        """The clip as a part of `report.json`."""
        video = self.video
        return {
            "path": str(self.path),
            "bytes": self.path.stat().st_size,
            "size": video.size,
            "frames_sha256": video.frames_sha256,
            "audio_sha256": video.audio_sha256,
            "stage_durations_s": video.stage_durations,
            "inference_time_s": video.inference_time_s,
            "warnings": video.warnings,
            "references": [reference.model_dump(mode="json") for reference in video.references],
            "execution": video.execution.model_dump() if video.execution else None,
            "file": asdict(self.facts),
        }


def requests(samples: Samples) -> dict[str, VideoRequest]:
    """One request a task, 4 s each, by the name of its file."""
    fields = {"seconds": "4", "num_inference_steps": "9", "seed": "1101"}
    wide = {**fields, "aspect_ratio": "16:9"}
    return {
        "t2va": VideoRequest("A red ball rolls over wet grass, birds sing.", wide, {"task": "t2va"}),
        "fl2va": VideoRequest("The sun sets behind the hill.", fields, {"task": "fl2va"}, [samples.picture]),
        "ref2va": VideoRequest(
            "<Video 1> continues in the light of <Picture 1>, and <Audio 1> tells a story.",
            wide,
            {"task": "ref2va"},
            [samples.picture, samples.video, samples.voice],
        ),
    }


def make_clip(client: VideoClient, task: str, request: VideoRequest, path: Path) -> Clip:
    """Create, follow, download and check one clip.

    Raises:
        DemoFailed, ClientError: it did not work.
    """
    bar = ProgressBar(task, sys.stdout)
    video = client.wait(client.create(request).id, timeout_s=CLIP_SECONDS, on_change=bar.show)
    if video.status != "completed":
        why = f"{video.error.code}: {video.error.message}" if video.error else ""
        raise DemoFailed(f"the {task} job is {video.status} {why}")
    client.download(video.id, path)
    clip = Clip(path, video, check_clip(path))
    if wrong := faults(clip):
        raise DemoFailed(f"{path}: {'; '.join(wrong)}")
    return clip


def faults(clip: Clip) -> list[str]:
    """What is wrong with a clip, by decoding it; nothing when it keeps its job's word."""
    facts, video = clip.facts, clip.video
    checks = {
        f"{facts.frames} frames where the job says {video.num_frames}": facts.frames == video.num_frames,
        f"{facts.width}x{facts.height} where the job says {video.size}": f"{facts.width}x{facts.height}" == video.size,
        f"{facts.fps:g} frames a second": facts.fps == FPS,
        f"sound at {facts.sample_rate} Hz in {facts.channels} channels": (facts.sample_rate, facts.channels)
        == (SAMPLE_RATE, AUDIO_CHANNELS),
        f"sound of {facts.sound_seconds:.3f} s under video of {facts.video_seconds:.3f} s": abs(
            facts.sound_seconds - facts.video_seconds
        )
        <= AAC_FRAME_SECONDS,
        f"{facts.flat_frames} frames of one colour": facts.flat_frames == 0,
        "silence": facts.sound_peak > 0,
        "no digest": video.frames_sha256 is not None and video.audio_sha256 is not None,
    }
    return [fault for fault, fine in checks.items() if not fine]


def table(clips: dict[str, Clip]) -> str:
    """The clips, one a line: file, what it holds, digest, stage times."""
    rows = [("file", "size", "length", "bytes", "frames sha256", "seconds by stage")]
    for clip in clips.values():
        stages = " ".join(
            f"{name} {seconds:.2f}"
            for name, seconds in clip.video.stage_durations.items()
            if not name.startswith(PART_OF_ENCODE)
        )
        length = f"{clip.facts.frames} frames, {clip.facts.video_seconds:.2f} s"
        digest = (clip.video.frames_sha256 or "")[:16]
        rows.append((str(clip.path), clip.video.size, length, str(clip.path.stat().st_size), digest, stages))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def run(folder: Path, model: str, deploy_config: str) -> None:
    """The whole demo, into `folder`.

    Raises:
        DemoFailed, ClientError, ServiceEnded, JobFailed: it did not work; the logs' ends are printed.
    """
    begin = time.monotonic()
    samples = make_samples(folder / "inputs")
    asked = world_requests(folder / "inputs") if model == "demo" else requests(samples)
    encoder_port, diffusion_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="minimax-h3-demo-") as state:
        settings = PairSettings(
            model, deploy_config, encoder_port, diffusion_port, Path(state), log_dir=folder / "logs"
        )
        with Pair(settings) as pair:
            try:
                clips, ready_s = _clips(pair, asked, folder)
            except (DemoFailed, ClientError, ServiceEnded):
                print(pair.tails(), file=sys.stderr)
                raise
    total = time.monotonic() - begin
    report = {"model": model, "deploy_config": deploy_config, "start_s": round(ready_s, 2), "total_s": round(total, 2)}
    content = {**report, "clips": {task: clip.record() for task, clip in clips.items()}}
    (folder / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    rows = [contact_sheet.Row(task, each.prompt, each.references, clips[task].path) for task, each in asked.items()]
    contact_sheet.draw(rows, folder / SHEET)
    print(f"\n{table(clips)}\n\nAll of them at a glance: {folder / SHEET}; details in {folder / 'report.json'}")
    print(f"Both services are stopped. {total:.0f} s in all.\n")


def _clips(pair: Pair, asked: dict[str, VideoRequest], folder: Path) -> tuple[dict[str, Clip], float]:
    begin = time.monotonic()
    settings = pair.settings
    print(f"starting the encoder on {settings.encoder_url} and diffusion on {settings.diffusion_url} ...", flush=True)
    pair.wait_ready(READY_SECONDS)
    ready_s = time.monotonic() - begin
    print(f"both are ready after {ready_s:.1f} s", flush=True)
    with VideoClient(settings.diffusion_url) as client:
        clips = {task: make_clip(client, task, request, folder / f"{task}.mp4") for task, request in asked.items()}
    return clips, ready_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. 0 when every clip is as it must be."""
    parser = argparse.ArgumentParser(prog="video_client.demo", description="Make one clip of each task.")
    parser.add_argument("--folder", type=Path, default=Path("demo"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--deploy-config", help="demo or tiny, as the model is")
    options = parser.parse_args(arguments)
    own = options.model if options.model in BEFORE else "tiny"
    print(BEFORE.get(options.model, ""))
    end_on_term()
    try:
        run(options.folder, options.model, options.deploy_config or own)
    except (DemoFailed, ClientError, ServiceEnded, JobFailed) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(AFTER.get(options.model, ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
