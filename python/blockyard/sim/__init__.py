"""Deterministic simulation: the real code of stores in virtual time, over modelled servers that fail.

One seed is one run: the same calls in the same order, the same faults, the same log. See docs/simulation.md.
"""

from blockyard.sim.fleet import FleetOptions, FleetReport, simulate_fleet

__all__ = ["FleetOptions", "FleetReport", "simulate_fleet"]
