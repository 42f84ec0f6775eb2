"""The modelled servers of a fleet, and the links between them and its engines."""
