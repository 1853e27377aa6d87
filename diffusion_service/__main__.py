"""`python -m diffusion_service`, the same as `h3-diffusion`: the API process. Ranks import it and start nothing."""

import sys

from diffusion_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
