"""What clips of the demo checkpoint show and sound like, judged from their MP4 files alone."""
