"""The services with phases that can be held open, and ranks that fail on demand: what a fault test starts.

`python -m tests.faults.held encoder|diffusion ARGUMENTS` is the real service on the real path; only its ranks pass
gates on the way. A gate is a file in the folder `FAULT_GATES`:

    <phase>            every rank waits there, beating, until the file is gone
    <phase>.raise-1    rank 1 raises there
    <phase>.memory-1   rank 1 runs out of memory there
    <phase>.spin-1     rank 1 loops there without a beat, while the others wait for it in a collective
    muxing             the leader completes no file until this one is gone
    muxing.full-0      the leader finds no room for the end of a file
"""

import sys

import diffusion_service.cli
import diffusion_service.settled
import encoder_service.app
import encoder_service.cli


def main(role: str, arguments: list[str]) -> int:
    if role == "encoder":
        encoder_service.app.RANKS = "tests.faults.encoder_ranks:main"
        return encoder_service.cli.main(arguments)
    diffusion_service.settled.RANKS = "tests.faults.diffusion_ranks:main"
    return diffusion_service.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
