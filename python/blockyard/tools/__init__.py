"""What an engine never imports: the command line, the demo, replays, simulated fleets, and their pictures."""
