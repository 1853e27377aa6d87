"""The demo checkpoint's little world: scenes, their prompts, and the clips they are. Any process, without torch."""
