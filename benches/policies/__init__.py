"""Eviction policies in plain Python, and generated requests to compare them on."""
