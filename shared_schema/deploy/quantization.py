"""Which of the transformer's linears FP8 takes, by name, and what `ignored_layers` leaves of them. Pure."""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from shared_schema.errors import DeployError

KEY = "stages[1].diffusion_quantization_config"
BLOCKS = "transformer_blocks."
TOGETHER = ("attn.to_q", "attn.to_k", "attn.to_v")
"""One product on one GPU."""
LINEARS = (*TOGETHER, "attn.to_out.0", "ff.net.0.proj", "ff.net.2")
"""Of every main block."""
MODULATION = "adaln_proj.linear"
"""Of every main block too, where several ranks each hold it."""
CONDITION = "context_embedder"
"""Before the blocks: it projects what the encoder made of the prompt and the media, once a request."""
MOST_KINDS = 4
"""Blocks that differ in what is ignored are compiled each for itself, before the service is ready."""


def takes(module: str, ignored: Sequence[str], linears: Collection[str] = LINEARS) -> bool:
    """Whether a linear of the transformer gets FP8 products; `linears` are those of a block that can."""
    of_block = module.startswith(BLOCKS) and module.split(".", 2)[-1] in linears
    if not of_block and module != CONDITION:
        return False
    block = module.split(".attn.")[0]
    shared = [f"{block}.{each}" for each in TOGETHER]
    together = shared if module in shared else [module]
    return not any(_matches(pattern, each) for pattern in ignored for each in together)


def check_ignored(ignored: Sequence[str], blocks: int) -> None:
    """Stop before weights are read if a name is none of a transformer with so many blocks.

    Raises:
        DeployError: an ignored layer is none, or blocks are left of too many kinds.
    """
    every = (*LINEARS, MODULATION)
    names = [[f"{BLOCKS}{number}.{linear}" for linear in every] for number in range(blocks)]
    for pattern in ignored:
        if not any(_matches(pattern, name) for block in (*names, [CONDITION]) for name in block):
            known = ", ".join(every)
            raise DeployError(
                f"{KEY}: ignored_layers: {pattern!r} is no layer that fp8 takes: they are {CONDITION}, and {known} "
                f"of {BLOCKS}0 to {blocks - 1}"
            )
    kinds = {tuple(takes(name, ignored) for name in block) for block in names}
    if len(kinds) > MOST_KINDS:
        raise DeployError(
            f"{KEY}: ignored_layers leaves blocks of {len(kinds)} kinds, and {MOST_KINDS} are served: each is "
            "compiled for itself, so name layers for all blocks, or whole blocks"
        )


def _matches(pattern: str, module: str) -> bool:
    return fnmatchcase(f".{module}.", f"*.{pattern}.*")
