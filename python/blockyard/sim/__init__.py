"""Workloads, traces and the demo: the whole path, run and compared with a run that never moved a block."""
