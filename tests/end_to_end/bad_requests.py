"""Requests that must be refused at POST: each with the status, and what its error has to name. Plain data."""

from dataclasses import dataclass, field

GOOD = {"prompt": "a red ball", "size": "64x64", "num_frames": "107", "num_inference_steps": "2"}
FIELD = "input_references"


@dataclass(frozen=True)
class Bad:
    """One refused request: what is sent over `GOOD` (None takes a field away), and what the answer names."""

    name: str
    fields: dict[str, str | None] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    param: str = ""
    """Must be part of `error.param`, or of one of its alternatives split by `|`; empty: any."""
    says: str = ""
    """Must be part of `error.message`."""
    status: int = 400
    code: str = ""

    def form(self) -> dict[str, str]:
        """The text parts."""
        return {name: value for name, value in {**GOOD, **self.fields}.items() if value is not None}


def wrong(name: str, value: str, *, drop: str = "", param: str = "") -> Bad:
    """A value that breaks the rule of one field."""
    fields: dict[str, str | None] = {name: value}
    if drop:
        fields[drop] = None
    return Bad(f"{name}={value}", fields, param=param or name)


def extra(text: str, param: str) -> Bad:
    """A value that breaks a rule inside `extra_params`."""
    return Bad(f"extra_params={text}", {"extra_params": text, "num_frames": None}, param=param)


LENGTHS = (
    *(wrong("seconds", value, drop="num_frames") for value in ("2", "3.9", "15.5", "0", "-4", "NaN", "inf", "four")),
    *(wrong("num_frames", value) for value in ("95", "363", "0", "-107", "107.5")),
    *(wrong("fps", value) for value in ("8", "12", "16", "23.976", "25", "30", "60", "0", "-1", "NaN")),
    Bad("seconds and num_frames disagree", {"seconds": "10"}, param="seconds|num_frames"),
    extra('{"duration": 16}', "duration"),
)
"""Cases 10, 17, 30."""

SIZES = (
    *(
        wrong("size", value)
        for value in ("192x64", "16x16", "100x56", "128x0", "99999x99999", "64x64x3", "256x32", "x64", "big")
    ),
    Bad("width alone", {"size": None, "width": "64"}, param="width|height"),
    Bad("height alone", {"size": None, "height": "64"}, param="width|height"),
    Bad("nothing wide", {"size": None, "width": "0", "height": "64"}, param="width|height"),
    Bad("not a multiple of 32", {"size": None, "width": "80", "height": "64"}, param="width|height|size"),
    Bad("size and width disagree", {"width": "96", "height": "64"}, param="width|height|size"),
    Bad("ratio and size disagree", {"aspect_ratio": "9:16", "size": "128x64"}, param="aspect_ratio|size"),
    Bad("ratio past 4:1", {"aspect_ratio": "5:1", "size": None}, param="aspect_ratio"),
    Bad("no ratio", {"aspect_ratio": "wide", "size": None}, param="aspect_ratio"),
    wrong("short_edge", "768"),
)
"""Case 19, on a checkpoint whose canvas has at most 8192 pixels."""

VALUES = (
    *(wrong("num_inference_steps", value) for value in ("1", "0", "201", "-5", "2.5", "many")),
    *(wrong("flow_shift", value) for value in ("0", "-1", "101", "NaN", "inf")),
    *(wrong("audio_flow_shift", value) for value in ("0", "inf")),
    wrong("seed", str(2**63)),
    wrong("seed", "1.5"),
    wrong("num_outputs_per_prompt", "0"),
    wrong("priority", "101"),
    wrong("priority", "high"),
    wrong("num_outputs_per_prompt", "11"),
    Bad("an empty prompt", {"prompt": ""}, param="prompt"),
    Bad("a blank prompt", {"prompt": " \n\t"}, param="prompt"),
    Bad("no prompt", {"prompt": None}, param="prompt"),
    Bad("a model that is not served", {"model": "/etc"}, param="model", code="model_not_found"),
    wrong("quality", "medium"),
    extra('{"task": "nope"}', "task"),
    extra('{"task": "t2va", "frame_indices": [5]}', "frame_indices"),
    extra("{not json", "extra_params"),
    extra('["a list"]', "extra_params"),
    extra('{"unheard_of": 1}', "unheard_of"),
)
"""Values that break the rule of their field."""

NOT_SERVED = (
    wrong("negative_prompt", "ugly"),
    wrong("guidance_scale", "7.5"),
    wrong("true_cfg_scale", "4"),
    wrong("generate_sound", "false"),
    wrong("enable_frame_interpolation", "true"),
    wrong("audio_mode", "lock_source"),
    wrong("lora", "x"),
    wrong("webhook_url", "http://127.0.0.1:9/"),
    wrong("source_video", "x"),
    wrong("control_video", "x"),
    wrong("long_video", "true"),
    wrong("video_codec_options", "{}"),
    wrong("file_id", "file-1"),
)
"""Known fields that nobody may believe to work."""

UNKNOWN = (
    *(
        wrong(name, "1")
        for name in ("referenses", "frame_rate", "tile_size", "output_path", "prompt_path", "file_name", "sampler")
    ),
    Bad("an empty reference object", {"image_reference": "{}"}, param="image_reference"),
    Bad("a local file", {"image_reference": '{"image_url": "file:///etc/passwd"}'}, param="image_reference"),
    *(
        Bad(f"media from {url}", {"image_reference": f'{{"image_url": "{url}"}}'}, param="image_reference")
        for url in ("http://127.0.0.1:9/a.png", "http://[::1]/", "http://169.254.169.254/", "http://2130706433/")
    ),
    Bad("a data URL that is not one", {"image_reference": '{"image_url": "data:image/png;base64,!!"}'}, param="image"),
)
"""Cases 15, 24, 25, 58."""


def reference(name: str, *files: str, says: str = "", param: str = "", task: str = "ref2va") -> Bad:
    """Files that break a rule of the task."""
    return Bad(name, {"extra_params": f'{{"task": "{task}"}}'}, files, param=param, says=says)


FILES = (
    *(reference(f"{file} alone", file, param="input_reference") for file in ("fake.png", "img_trunc.jpg")),
    reference("a video without its index", "vid_nomoov.mp4", param="input_reference"),
    reference("cut short", "vid_truncated.mp4", param="input_reference"),
    reference("nothing at all", "empty.png", param="input_reference"),
    reference("a format that is not read", "img_heic.heic", param="input_reference"),
    reference("high dynamic range", "vid_hdr_pq.mp4", param="input_reference", says="HDR"),
    reference("four frames a second", "vid_4fps.mp4", param="input_reference"),
    reference("one second of sound", "ref1.png", "aud_1s.wav", param="1"),
    reference("too small", "img_tiny.png", param="input_reference"),
    reference("six to one", "img_6to1.png", param="input_reference"),
    reference("three frames", "vid_3f.mp4", param="input_reference"),
    reference("sixteen seconds", "vid_16s.mp4", param="input_reference"),
    reference("sound past fifteen seconds", "ref1.png", "aud_15s5.wav", says="15.5"),
    reference("sound alone", "aud_stereo_32k.wav"),
    reference("noise called sound", "ref1.png", "aud_bad.wav"),
    reference("a bad file among good ones", "ref1.png", "aud_bad.wav", "ref2.png", "aud_mono_96k.wav", param="1"),
    reference("ten pictures", *(f"ref{n % 9 + 1}.png" for n in range(10)), says="9"),
    reference("four videos", *["vid_24fps.mp4"] * 4),
    reference("twenty seconds of video", "vid_15s.mp4", "vid_24fps.mp4"),
    reference("twenty seconds of sound", "ref1.png", "aud_15s.wav", "aud_stereo_32k.wav"),
    reference("a picture for text alone", "ref1.png", task="t2va", param="input_reference"),
    reference("a video as a keyframe", "vid_24fps.mp4", task="fl2va", param="input_reference"),
    reference("three keyframes", "ref1.png", "ref2.png", "ref3.png", task="fl2va"),
    reference("no keyframe", task="fl2va"),
    reference("no reference", task="ref2va"),
    reference("a six to one keyframe", "img_6to1.png", task="fl2va", param="input_reference"),
)
"""Cases 11, 12, 60, 63, 65, 67, 69."""

BOMBS = (
    reference("900 megapixels in 110 kB", "img_bomb.png", param="input_reference"),
    reference("two hours in 1.6 MB", "ref1.png", "aud_2h.flac"),
    reference("four hours of two pixels", "vid_4h.mp4", param="input_reference"),
    reference("a header of many pixels", "img_big_header.png", param="input_reference"),
)
"""Case 67."""

ALL = (*LENGTHS, *SIZES, *VALUES, *NOT_SERVED, *UNKNOWN, *FILES)
