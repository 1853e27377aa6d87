"""`python -m video_client`."""

import sys

from video_client.cli import main

sys.exit(main())
