"""An exclusive host in vLLM: `BlockyardKVConnector`."""
