"""`python -m encoder_service`, the same as `h3-encoder`: the API process. A spawned rank imports this and starts nothing."""

import sys

from encoder_service.cli import main

if __name__ == "__main__":
    sys.exit(main())
