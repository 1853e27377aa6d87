"""Programs that measure; each takes `--json FILE` and writes its figures there, with units in their names."""
