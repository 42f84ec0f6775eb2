"""The modelled servers of a fleet, and the links from its engines to them."""
