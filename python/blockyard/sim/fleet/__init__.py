"""The simulated fleet: engines with real stores over one modelled server, the faults, and what checks them."""
