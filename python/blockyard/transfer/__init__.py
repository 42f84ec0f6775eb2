"""Moves blocks between the device and the host: torch ops, the library that implements them for CUDA, cache engines."""
