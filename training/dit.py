"""Stage `dit`: one partition of the transformer, from noise to the world's clips.

python -m training.dit --out DIR --partition transformer --minutes 9
"""

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from training.course import Course, Losses, Options, options_of, parser
from training.examples import Group, Teacher, group
from training.flow import Clips, draw_parts, moment, noised, on
from training.folder import PARTITIONS, begun, wait_for, write_component
from training.packing import Packed
from training.speaking import Speaker
from training.world import World, read_world

BATCH, RATE = 64, 1e-3
EXAMPLES = {"transformer": 16384, "transformer_ref": 16384}
SOUND_WEIGHT = 0.7
"""Of the sound's loss, next to the picture's."""


class Lesson:
    """One step: some examples of one form, noised, and the velocities that they should have."""

    def __init__(self, packed: Packed, world: World, groups: list[Group], options: Options) -> None:
        self._packed, self._world, self._groups, self._options = packed, world, groups, options
        self._batch = options.batch or BATCH
        self._weights = torch.tensor([float(len(each.targets)) for each in groups])

    def clips(self, random: torch.Generator) -> Clips:
        """A batch of clean clips."""
        chosen = int(torch.multinomial(self._weights, 1, generator=random))
        return on(self._groups[chosen].pick(self._world, random, self._batch), self._options.device)

    def __call__(self, step: int) -> Losses:
        """Losses of batch number `step`: mean squares of both streams' velocities."""
        random = torch.Generator().manual_seed(self._options.seed * 1_000_003 + step)
        clips = self.clips(random)
        at = moment(draw_parts(self._batch, random).to(self._options.device))
        video_noise, sound_noise = torch.randn_like(clips.video), torch.randn_like(clips.sound)
        video, sound = self._packed(noised(clips, at, video_noise, sound_noise))
        # Towards the data: from noise, one unit of time away from it.
        seen = F.mse_loss(video.float(), clips.video - video_noise)
        heard = F.mse_loss(sound.float(), clips.sound - sound_noise)
        return {"total": seen + SOUND_WEIGHT * heard, "video": seen, "sound": heard}


def examples(options: Options, partition: str, count: int) -> tuple[World, list[Group]]:
    """The world on the device, and what a partition learns from."""
    world = read_world(options.out / "world")
    speaker = Speaker(options.checkpoint, options.device)
    teacher = Teacher(world, speaker, options.seed)
    drafts = teacher.text_drafts(count) if partition == "transformer" else teacher.reference_drafts(count)
    groups = group(drafts, world, speaker, options.device)
    return replace(world, video=world.video.to(options.device), sound=world.sound.to(options.device)), groups


def compiled(transformer: Any, options: Options) -> Any:
    """The same, its blocks compiled for all lengths where that is wanted."""
    if options.compile:
        transformer.compile_repeated_blocks(dynamic=True)
    return transformer


def main() -> None:
    """Train one partition, and write it into the checkpoint's folder."""
    given = parser("dit", begins=True)
    given.add_argument("--partition", choices=PARTITIONS, required=True)
    given.add_argument("--examples", type=int, help="how many to put together; the partition's own number")
    given.add_argument("--rate", type=float, default=RATE, help="the highest learning rate")
    arguments = given.parse_args()
    options, partition = options_of(arguments), arguments.partition
    world, groups = examples(options, partition, arguments.examples or EXAMPLES[partition])
    if options.wait and options.start_from is not None:
        wait_for(options.start_from)
    model = begun(partition, options.start_from).to(options.device)
    packed = Packed(compiled(model, options))
    course = Course(partition, options, model, arguments.rate, list(model.parameters()))
    lesson = Lesson(packed, world, groups, options)
    course.run(lesson, lambda: write_component(options.checkpoint, partition, model))


if __name__ == "__main__":
    main()
