"""`h3-video`: one clip from one command, from upload to file, in the caller's own process."""

import argparse
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from shared_schema.quality import Quality
from video_client.cli import URL, explain, key_from
from video_client.client import ClientError, ServiceAway, StillGoing, VideoClient, VideoRequest
from video_client.progress import ProgressBar

PATIENCE_S = 60.0
"""How long a service may be away, as in a restart, before the command gives up on it."""
DONE, FAILED, USAGE, AWAY, UNFINISHED, INTERRUPTED = 0, 1, 2, 3, 4, 130
CODES = """exit codes:
  0    the clip is in its file
  1    the service refused the request, or the job failed; the last line says why
  2    wrong usage
  3    no service answers, or none any more
  4    the job is not over after --timeout; it goes on: python -m video_client wait ID
  130  Ctrl-C; the job was cancelled
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one clip; the exit code is one of `CODES`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.ref and (options.image or options.last):
        parser.error("--image and --last are frames of the clip, --ref is what it looks like: give one kind")
    try:
        with VideoClient(options.url, key=key_from(options.key_file), patience_s=PATIENCE_S) as client:
            return _make(client, _request(options), options)
    except ServiceAway as error:
        return _say(error, AWAY)
    except StillGoing as error:
        return _say(error, UNFINISHED)
    except ClientError as error:
        return _say(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _say(what: object, code: int) -> int:
    print(f"h3-video: {what}", file=sys.stderr)
    return code


def _make(client: VideoClient, request: VideoRequest, options: argparse.Namespace) -> int:
    # With a key of its own the upload can be repeated, should its answer be lost.
    video_id = client.create(request, once=uuid.uuid4().hex).id
    try:
        bar = ProgressBar("video", sys.stderr)
        video = client.wait(video_id, timeout_s=options.timeout, on_change=bar.show)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _say(f"{video_id} is {client.cancel(video_id).status}", INTERRUPTED)
    if video.status != "completed":
        return _say(explain(video), FAILED)
    for warning in video.warnings:
        _say(f"warning: {warning}", DONE)
    path = options.output or Path(f"{video_id}.mp4")
    size = client.download(video_id, path)
    print(f"{path}  {size} bytes")
    return DONE


def _request(options: argparse.Namespace) -> VideoRequest:
    names = ("seconds", "size", "aspect_ratio", "num_inference_steps", "seed", "quality")
    fields = {name: value for name in names if (value := getattr(options, name)) is not None}
    frames = [(path, index) for path, index in ((options.image, 0), (options.last, -1)) if path is not None]
    if frames:
        extra = {"task": "fl2va", "frame_indices": [index for _, index in frames]}
        return VideoRequest(options.prompt, fields, extra, [path for path, _ in frames])
    return VideoRequest(options.prompt, fields, {"task": "ref2va" if options.ref else "t2va"}, options.ref)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="h3-video",
        description="Make one video with sound on a MiniMax-H3 service.",
        epilog=CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt")
    parser.add_argument("--image", type=Path, metavar="FILE", help="the first frame")
    parser.add_argument("--last", type=Path, metavar="FILE", help="the last frame")
    parser.add_argument(
        "--ref",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a picture, video or sound that the prompt speaks of, in its order; repeat",
    )
    parser.add_argument("--seconds", help="length, 4 to 15")
    parser.add_argument("--size", help="WIDTHxHEIGHT")
    parser.add_argument("--aspect-ratio", help="16:9, 9:16, 1:1, 4:3, 3:4 or 21:9")
    parser.add_argument("--steps", dest="num_inference_steps", help="sigma points, one more than forwards")
    parser.add_argument(
        "--quality", choices=get_args(Quality), help="high skips passes that change little: faster, not lossless"
    )
    parser.add_argument("--seed", help="the same seed makes the same clip; -1 draws one")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the clip goes (ID.mp4)")
    parser.add_argument("--url", default=URL, help="diffusion service (%(default)s)")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="holds the API key, where the service wants one")
    parser.add_argument("--timeout", type=float, default=7200, metavar="S", help="longest wait (%(default)g)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
