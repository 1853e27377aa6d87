"""How the DiT and the decoder are spread over the ranks of a group; the models themselves know nothing of it."""
