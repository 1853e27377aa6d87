"""Where the trained demo checkpoint and its Turbo adapters lie: in this package, also when installed. Any process."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""In the released layout; made as `training/README.md` says."""
TURBO = Path(__file__).parent / "turbo"
"""An adapter of 4 forwards for each partition, under the names of published ones."""
