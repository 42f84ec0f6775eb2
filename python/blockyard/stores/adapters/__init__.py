"""What engine adapters share: `objects` of any length, `jobs` in the background, and names for a `checkpoint`."""
