"""`python -m encoder_service`, the same as `h3-encoder`: the API process. Ranks import it and start nothing."""

import sys

from encoder_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
