"""The diffusion service: everything that makes the clip, and the public API."""
