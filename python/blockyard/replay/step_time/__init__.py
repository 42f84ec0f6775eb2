"""How long an engine takes for a step: predicted from measured operators, or fitted to a run of one's own engine."""

from blockyard.replay.engine import StepTime
from blockyard.replay.step_time.linear import LinearStepTime
from blockyard.replay.step_time.run import EngineLimits, EngineRun
from blockyard.replay.step_time.serve import ServedRun, serve

__all__ = ["EngineLimits", "EngineRun", "LinearStepTime", "ServedRun", "StepTime", "serve"]
