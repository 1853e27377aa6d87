"""How one GPU runs diffusers' models fast: attention, once-a-request work, compile. Runs in diffusion ranks; torch."""
