"""An entry whose import does not end."""

import time

time.sleep(600)
