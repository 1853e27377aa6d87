"""From a payload to frames and sound: prepare, denoise, decode. Runs in diffusion ranks."""
