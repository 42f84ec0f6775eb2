"""Replays traces through the real block manager and scheduler, to predict hit rates, times and costs."""
