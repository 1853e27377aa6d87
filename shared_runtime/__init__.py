"""What both services run on."""
