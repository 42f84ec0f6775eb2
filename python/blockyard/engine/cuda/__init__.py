"""CUDA: streams and events of the copy engine, and the measurement of copy strategies."""
