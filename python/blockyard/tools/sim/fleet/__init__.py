"""The simulated fleet: engines with real stores over one modelled server, faults, and checks."""
