"""What the VAEs are taught about their latents: to be read also where they are not quite right. Torch.

Latents are not drawn from a posterior here: with noise of the size of a prior's the decoders of this little world learn
to look past them, and the audio VAE then says the same of every sound. What is made by a sampler is off by a part of
its spread, whatever that is, and so is what the decoders learn from: by a little in one clip, by more in another.
"""

import torch

OFF = 0.15
"""Of the latents' spread, the most that a decoder has to bear."""
SMALL = 1e-4
"""Weight of what keeps latents from growing; their spread is made one afterwards."""


def disturbed(mean: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Latents `(batch, ...)` with noise on them, of another strength in each clip."""
    noise = torch.randn(mean.shape, generator=random)
    noise *= OFF * torch.rand(len(mean), *[1] * (mean.ndim - 1), generator=random)
    return mean + mean.detach().std() * noise.to(mean.device)
