"""KV tensors that give memory back to the system when they shrink."""
