"""Eviction policies compared: generated requests, and policies in Python."""
