"""Options in configurations of engines: read and checked without the engine, by adapters and `blockyard doctor`."""
