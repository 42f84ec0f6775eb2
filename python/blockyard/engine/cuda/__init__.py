"""CUDA: the op library, its streams, and the measured choice among the strategies for a copy."""
