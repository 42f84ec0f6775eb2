"""Workloads, traces and the demo: the whole path, compared with an unpaged run."""
