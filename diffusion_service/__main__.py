"""`python -m diffusion_service`, the same as `h3-diffusion`: the API process. A spawned rank imports this and starts nothing."""

import sys

from diffusion_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
