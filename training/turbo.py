"""Stage `turbo`: a LoRA adapter that does in 4 forwards what a partition does in more, in the published files' form.

python -m training.turbo --out DIR --partition transformer --minutes 3
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from training.course import Course, Losses, options_of, parser
from training.dit import EXAMPLES, Lesson, compiled, examples
from training.flow import Clips, batch_of, moment, noised
from training.folder import PARTITIONS, read_component, wait_for
from training.packing import Packed

RANK, ALPHA = 16, 8
"""ALPHA is what the file's contract says where the file says nothing; it says so too."""
FORWARDS, WITHIN = 4, 4
"""Forwards of the adapter, and forwards of the teacher within each of them."""
BATCH, RATE = 64, 1e-3
MODULES = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
ARTIFACTS = {
    "transformer": "minimax_h3_fl2v_turbo_4step_v0.1.safetensors",
    "transformer_ref": "minimax_h3_ref2v_turbo_4step_v0.1_bf16.safetensors",
}
"""The names of 4 forwards at shift 12: the name is what tells a service the schedule."""


class Adapted(nn.Module):
    """A linear with two narrow matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features) * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """What the linear says, and what the adapter adds."""
        narrow = F.linear(F.linear(rows, self.down), self.up)
        out: torch.Tensor = self.base(rows) + narrow * (ALPHA / RANK)
        return out


def adapt(transformer: Any) -> dict[str, Adapted]:
    """Put an adapter beside every linear that the published files have; by the linears' names."""
    transformer.requires_grad_(False)
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    found = {}
    for name in (name for name in names if name.endswith(MODULES)):
        parent, _, last = name.rpartition(".")
        found[name] = Adapted(transformer.get_submodule(name))
        setattr(transformer.get_submodule(parent), last, found[name])
    return found


def write_adapter(file: Path, adapters: dict[str, Adapted]) -> None:
    """The file that a service binds."""
    tensors = {}
    for name, adapted in adapters.items():
        for side, matrix in (("lora_A", adapted.down), ("lora_B", adapted.up)):
            tensors[f"{name}.{side}.default.weight"] = matrix.detach().to(torch.bfloat16).cpu().contiguous()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"key_format": "minimax-h3-diffusers", "alpha": str(ALPHA)})


class Distilling:
    """One step: where the teacher gets from one of the adapter's sigma points to the next, in one go."""

    def __init__(self, teacher: Packed, pupil: Packed, lesson: Lesson, seed: int, batch: int) -> None:
        self._teacher, self._pupil, self._lesson, self._seed, self._batch = teacher, pupil, lesson, seed, batch

    def __call__(self, step: int) -> Losses:
        """Losses of batch number `step`: mean squares of both streams' velocities."""
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        clips = self._lesson.clips(random)
        parts = (torch.randint(1, FORWARDS + 1, (self._batch,), generator=random) / FORWARDS).to(clips.video.device)
        begun = moment(parts)
        batch = noised(clips, begun, torch.randn_like(clips.video), torch.randn_like(clips.sound))
        shown, heard = clips.layout.shown, clips.layout.heard
        start = batch.video[:, shown:], batch.sound[:, heard:]
        end = self._walk(clips, parts, *start)
        after = moment(parts - 1 / FORWARDS)
        wanted = (
            (end[0] - start[0]) / (begun.video - after.video),
            (end[1] - start[1]) / (begun.sound - after.sound),
        )
        video, sound = self._pupil(batch)
        seen, listened = F.mse_loss(video.float(), wanted[0]), F.mse_loss(sound.float(), wanted[1])
        return {"total": seen + listened, "video": seen, "sound": listened}

    @torch.no_grad()
    def _walk(
        self, clips: Clips, parts: torch.Tensor, video: torch.Tensor, sound: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for within in range(WITHIN):
            at = moment(parts - within / WITHIN / FORWARDS)
            after = moment((parts - (within + 1) / WITHIN / FORWARDS).clamp_min(0))
            towards = self._teacher(batch_of(clips, at, video, sound))
            video = video + towards[0].float() * (at.video - after.video)
            sound = sound + towards[1].float() * (at.sound - after.sound)
        return video, sound


def main() -> None:
    """Train an adapter for one partition, and write its file."""
    given = parser("turbo")
    given.add_argument("--partition", choices=PARTITIONS, required=True)
    given.add_argument("--examples", type=int, help="how many to put together; half the partition's own number")
    arguments = given.parse_args()
    options, partition = options_of(arguments), arguments.partition
    world, groups = examples(options, partition, arguments.examples or EXAMPLES[partition] // 2)
    if options.wait:
        wait_for(options.checkpoint / partition)
    teacher, pupil = (read_component(options.checkpoint, partition).requires_grad_(False) for _ in range(2))
    adapters = adapt(pupil)
    pupils = Packed(compiled(pupil.to(options.device), options))
    teachers = Packed(compiled(teacher.to(options.device), options))
    watched = [matrix for each in adapters.values() for matrix in (each.down, each.up)]
    course = Course(f"turbo_{partition}", options, pupil, RATE, watched)
    lesson = Lesson(teachers, world, groups, options)
    distilling = Distilling(teachers, pupils, lesson, options.seed, options.batch or BATCH)
    file = options.out / "turbo" / ARTIFACTS[partition]
    course.run(distilling, lambda: write_adapter(file, adapters))


if __name__ == "__main__":
    main()
