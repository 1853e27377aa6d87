"""`python -m video_client`: the command line over `/v1/videos`, in the caller's own process."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shared_schema.videos import Video
from video_client.client import ClientError, VideoClient, VideoRequest
from video_client.progress import ProgressBar

URL = "http://127.0.0.1:8000"
FIELDS = (
    "seconds",
    "size",
    "aspect_ratio",
    "num_frames",
    "num_inference_steps",
    "flow_shift",
    "audio_flow_shift",
    "quality",
    "seed",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done, 1: the service refused or the job failed, 2: wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        with VideoClient(options.url, key=key_from(options.key_file)) as client:
            return int(options.run(client, options))
    except ClientError as error:
        print(f"video_client: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output has left (`| head`); what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def key_from(file: Path | None) -> str | None:
    """The key in a file; None where there is none.

    Raises:
        ClientError: it cannot be read.
    """
    if file is None:
        return None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(f"--key-file {file} cannot be read: {error}") from error


def create(client: VideoClient, options: argparse.Namespace) -> int:
    """Upload a request; with `--wait` follow it and fetch the clip."""
    given = {name: value for name in FIELDS if (value := getattr(options, name)) is not None}
    video = client.create(
        VideoRequest(
            prompt=options.prompt,
            fields={**given, **dict(options.field)},
            extra_params={"task": options.task} if options.task else {},
            references=options.reference,
            encoder_output=options.encoder_output,
        )
    )
    print(video.id)
    if not options.wait:
        return 0
    return _follow(client, video.id, options)


def wait(client: VideoClient, options: argparse.Namespace) -> int:
    """Follow a job to its end and fetch the clip."""
    return _follow(client, options.id, options)


def show(client: VideoClient, options: argparse.Namespace) -> int:
    """Print a job as JSON."""
    print(client.get(options.id).model_dump_json(indent=2, exclude_none=True))
    return 0


def listing(client: VideoClient, options: argparse.Namespace) -> int:
    """Print the newest jobs, one a line."""
    for video in client.page(limit=options.limit, after=options.after).data:
        print(f"{video.id}  {video.status:<11} {video.progress:3d} %  {video.task}  {video.size}  {video.seconds} s")
    return 0


def download(client: VideoClient, options: argparse.Namespace) -> int:
    """Fetch the MP4 of a completed job."""
    return _fetch(client, options.id, options.output)


def cancel(client: VideoClient, options: argparse.Namespace) -> int:
    """Stop a job."""
    print(client.cancel(options.id).status)
    return 0


def delete(client: VideoClient, options: argparse.Namespace) -> int:
    """Stop a job and remove it."""
    client.delete(options.id)
    return 0


def _follow(client: VideoClient, video_id: str, options: argparse.Namespace) -> int:
    bar = ProgressBar("video", sys.stderr)
    video = client.wait(video_id, timeout_s=options.timeout, on_change=bar.show)
    if video.status != "completed":
        print(f"video_client: {explain(video)}", file=sys.stderr)
        return 1
    for warning in video.warnings:
        print(f"video_client: warning: {warning}", file=sys.stderr)
    return _fetch(client, video_id, options.output)


def explain(video: Video) -> str:
    """Why a job has no clip, in one line."""
    if video.error is None:
        return f"{video.id} was {video.status}"
    return f"{video.id} {video.status}: {video.error.code}: {video.error.message}"


def _fetch(client: VideoClient, video_id: str, output: Path | None) -> int:
    path = output or Path(f"{video_id}.mp4")
    size = client.download(video_id, path)
    print(f"{path}  {size} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="video_client", description="Make videos with sound on a MiniMax-H3 service.")
    parser.add_argument("--url", default=URL, help="diffusion service (%(default)s)")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="holds the API key, where the service wants one")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_create(commands.add_parser("create", help="ask for a clip"))
    for name, run, text in (
        ("wait", wait, "follow a job and fetch its clip"),
        ("show", show, "print a job as JSON"),
        ("download", download, "fetch the clip of a completed job"),
        ("cancel", cancel, "stop a job"),
        ("delete", delete, "stop a job and remove it"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("id")
        command.set_defaults(run=run)
        if run in (wait, download):
            _add_output(command)
    command = commands.add_parser("list", help="print the newest jobs")
    command.add_argument("--limit", type=int, default=20)
    command.add_argument("--after", help="id of the last job of the page before")
    command.set_defaults(run=listing)
    return parser


def _add_create(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=create)
    command.add_argument("prompt")
    command.add_argument("--task", choices=("t2va", "fl2va", "ref2va"), help="default: by the references")
    command.add_argument("--reference", type=Path, action="append", default=[], metavar="FILE", help="in order; repeat")
    command.add_argument(
        "--encoder-output", type=Path, metavar="FILE", help="a finished encoding instead of references"
    )
    for name in FIELDS:
        command.add_argument(f"--{name.replace('_', '-')}")
    command.add_argument(
        "--field", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="any other field"
    )
    command.add_argument("--wait", action="store_true", help="follow the job and fetch the clip")
    _add_output(command)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", type=Path, metavar="FILE", help="where the clip goes (ID.mp4)")
    command.add_argument("--timeout", type=float, default=3600, metavar="S", help="longest wait (%(default)s)")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
