"""What engine adapters run over a store: `objects`, of any length and with text keys, and `jobs` in the background."""
