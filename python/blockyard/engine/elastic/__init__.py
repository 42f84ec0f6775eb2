"""KV tensors that return memory to the system when they shrink."""
