"""Deterministic simulation: the real code of stores in virtual time, over modelled servers that fail.

A seed determines the whole run: the calls and their order, the faults, the log. See docs/operate/simulation.md.
"""

from blockyard.tools.sim.fleet.campaign import Campaign, run_campaign
from blockyard.tools.sim.fleet.faults import FAULTS, Fault, read_faults
from blockyard.tools.sim.fleet.fleet import FleetOptions, FleetReport, simulate_fleet

__all__ = [
    "FAULTS",
    "Campaign",
    "Fault",
    "FleetOptions",
    "FleetReport",
    "read_faults",
    "run_campaign",
    "simulate_fleet",
]
