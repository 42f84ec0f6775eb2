"""Replays of traces through the real block manager and scheduler: hit rates, times, and what a size is worth."""
