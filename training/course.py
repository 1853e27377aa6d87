"""A stage's course: steps until its minutes are over, kept each minute, so that it can be gone on with. Torch."""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

Losses = dict[str, torch.Tensor]
Step = Callable[[int], Losses]
"""One batch, by the number of the step: its losses by name; `total` is the one that is learned from.

Torch's own random numbers are seeded by that number: what is drawn is the same, wherever a course was gone on with.
"""

KEEP_EVERY_S = 60.0
WARM_UP = 200
"""Steps until the full learning rate."""
LAST = 0.03
"""Of the learning rate, at the end."""
DRAWN = 2**31
"""Added to the seed of torch's own random numbers: steps draw from generators with the seed itself, too."""
MUON = 4
"""Times the learning rate, of matrices that Muon turns (tried: 1, 3, 4 and 8)."""
AVERAGED = 0.998
"""Of an average of weights, what stays at each step."""


@dataclass(frozen=True)
class Options:
    """What every stage is told."""

    out: Path
    minutes: float
    call_minutes: float | None
    seed: int
    resume: bool
    steps: int | None
    batch: int | None
    compile: bool
    half: bool
    start_from: Path | None
    wait: bool

    @property
    def device(self) -> torch.device:
        """The GPU where there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def checkpoint(self) -> Path:
        """The folder that becomes the demo checkpoint."""
        return self.out / "checkpoint"


def parser(stage: str, *, begins: bool = False) -> argparse.ArgumentParser:
    """Of the flags that all stages have; with `begins`, also the one of a stage that may begin with weights."""
    found = argparse.ArgumentParser(description=f"Train the demo checkpoint: stage {stage}.")
    found.add_argument("--out", type=Path, required=True, help="where everything is kept")
    found.add_argument("--minutes", type=float, default=1.0, help="of this stage in all, also over several calls")
    found.add_argument("--call-minutes", type=float, help="stop this call after so many, to be gone on with")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--resume", action="store_true", help="go on where the last call stopped")
    found.add_argument("--steps", type=int, help="stop after so many, for a try")
    found.add_argument("--batch", type=int, help="another size of batch, for a try")
    found.add_argument("--wait", action="store_true", help="for the component that another stage is still writing")
    found.set_defaults(start_from=None)
    if begins:
        found.add_argument("--start-from", type=Path, help="a component's folder, to begin with its weights")
    for name, does in (("compile", "compile what learns"), ("half", "compute in BF16 where that is enough")):
        switch = argparse.BooleanOptionalAction
        found.add_argument(f"--{name}", action=switch, default=torch.cuda.is_available(), help=does)
    return found


def options_of(given: argparse.Namespace) -> Options:
    """From parsed flags; seeds torch, and lets products run in TF32 where there is a GPU."""
    names = Options.__dataclass_fields__
    options = Options(**{name: getattr(given, name) for name in names})
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    options.out.mkdir(parents=True, exist_ok=True)
    return options


class Course:
    """One stage: the model, its optimizers, an average of its weights, and what became of its losses."""

    def __init__(
        self,
        name: str,
        options: Options,
        model: nn.Module,
        rate: float,
        watched: list[Any],
        *,
        half: bool = True,
        hidden: Sequence[nn.Parameter] = (),
    ) -> None:
        """`watched` are the parameters that learn, of which `hidden` are matrices between a layer and the next, learned
        by Muon; without `half`, BF16 is not enough for this stage."""
        self._half = half and options.half
        self.options = options
        self._name = name
        self._model = model
        self._learned = watched
        self._optimizers = _optimizers(watched, hidden, rate, fused=options.device.type == "cuda")
        self._rates = [[group["lr"] for group in each.param_groups] for each in self._optimizers]
        self._averages = [weight.detach().clone() for weight in watched]
        self.step = 0
        self.seconds = 0.0
        self.losses: list[dict[str, float]] = []
        self._file = options.out / "state" / f"{name}.pt"
        if options.resume and self._file.is_file():
            self._take_up()

    def run(self, step: Step, export: Callable[[], None]) -> None:
        """Learn until the minutes are over; `export` is called with the averaged weights in place."""
        began, kept, before = time.monotonic(), time.monotonic(), self.seconds
        first = self.step
        while self.seconds < self.options.minutes * 60:
            if self._stops(self.step - first, self.seconds - before):
                break
            losses = self._learn(step)
            now = time.monotonic()
            self.seconds = before + now - began
            if self.step % 20 == 0 or self.options.steps is not None:
                self._note(losses)
            if now - kept > KEEP_EVERY_S:
                self.keep()
                kept = now
        self.keep()
        self.averaged(export)
        print(f"{self._name}: {self.step} steps in {self.seconds:.0f} s: {self.losses[-1] if self.losses else {}}")

    def _stops(self, steps: int, seconds: float) -> bool:
        """Whether this call has done its part, whatever is left of the stage."""
        limits = ((self.options.steps, steps), (self.options.call_minutes, seconds / 60))
        return any(limit is not None and done >= limit for limit, done in limits)

    def _learn(self, step: Step) -> Losses:
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * self._pace()
        with torch.autocast(self.options.device.type, torch.bfloat16, enabled=self._half):
            torch.manual_seed(DRAWN + self.options.seed * 1_000_003 + self.step)
            losses = step(self.step)
        self._model.zero_grad(set_to_none=True)
        torch.autograd.backward(losses["total"])
        nn.utils.clip_grad_norm_(self._learned, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.step += 1
        part = min(AVERAGED, (self.step + 1) / (self.step + 10))
        torch._foreach_lerp_(self._averages, [weight.detach() for weight in self._learned], 1 - part)
        return losses

    def _pace(self) -> float:
        """Of the learning rate: up at first, then down along a cosine over the stage's minutes."""
        done = min(self.seconds / max(self.options.minutes * 60, 1e-9), 1.0)
        cosine = LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))
        return min(1.0, (self.step + 1) / WARM_UP) * cosine

    def _note(self, losses: Losses) -> None:
        values = {name: round(float(value.detach()), 6) for name, value in losses.items()}
        if not math.isfinite(values["total"]):
            raise FloatingPointError(f"{self._name}: the loss is {values} at step {self.step}")
        self.losses.append({"step": self.step, "seconds": round(self.seconds, 1), **values})

    def averaged(self, export: Callable[[], None]) -> None:
        """Call `export` while the model has the average of its weights."""
        own = [weight.detach().clone() for weight in self._learned]
        with torch.no_grad():
            for weight, average in zip(self._learned, self._averages, strict=True):
                weight.copy_(average)
            export()
            for weight, value in zip(self._learned, own, strict=True):
                weight.copy_(value)

    def keep(self) -> None:
        """Write down where this stage is; moments and averages in BF16, so that it can be carried."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "weights": [weight.detach() for weight in self._learned],
            "averages": [average.to(torch.bfloat16) for average in self._averages],
            "moments": [_in_half(each.state_dict()) for each in self._optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
        }
        partial = self._file.with_suffix(".part")
        torch.save(content, partial)
        partial.replace(self._file)
        self._draw()

    def _take_up(self) -> None:
        content = torch.load(self._file, map_location=self.options.device, weights_only=True)
        with torch.no_grad():
            for name, into in (("weights", self._learned), ("averages", self._averages)):
                for tensor, value in zip(into, content[name], strict=True):
                    tensor.copy_(value)
        for optimizer, moments in zip(self._optimizers, content["moments"], strict=True):
            optimizer.load_state_dict(moments)
        self.step, self.seconds, self.losses = content["step"], content["seconds"], content["losses"]

    def _draw(self) -> None:
        """The losses as JSON, and as a picture."""
        folder = self.options.out / "losses"
        folder.mkdir(exist_ok=True)
        (folder / f"{self._name}.json").write_text(json.dumps(self.losses) + "\n", encoding="utf-8")
        draw_losses(folder / f"{self._name}.svg", self._name, self.losses)


def _optimizers(
    watched: list[Any], hidden: Sequence[nn.Parameter], rate: float, *, fused: bool
) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for what is `hidden`."""
    turned = {id(each) for each in hidden}
    others = [each for each in watched if id(each) not in turned]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=fused)
    ]
    if hidden:
        fast = rate * MUON
        found.append(torch.optim.Muon(hidden, lr=fast, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found


def _in_half(moments: dict[str, Any]) -> dict[str, Any]:
    """A copy: the optimizer goes on with what its state names."""
    kept = ("exp_avg", "momentum")
    moments["state"] = {
        key: {name: value.to(torch.bfloat16) if name.startswith(kept) else value for name, value in state.items()}
        for key, state in moments["state"].items()
    }
    return moments


def draw_losses(file: Path, title: str, losses: list[dict[str, float]]) -> None:
    """A picture of `losses` over the steps, logarithmic."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    for name in [name for name in (losses[0] if losses else {}) if name not in ("step", "seconds")]:
        axes.plot([each["step"] for each in losses], [each[name] for each in losses], label=name, linewidth=0.8)
    axes.set(title=title, xlabel="step", yscale="log")
    if losses:
        axes.legend()
    figure.savefig(file, metadata={"Date": None})
