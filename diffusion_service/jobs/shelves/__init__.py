"""Where the inputs and clips of jobs lie: a folder, or an object store. Runs in the diffusion API process."""
