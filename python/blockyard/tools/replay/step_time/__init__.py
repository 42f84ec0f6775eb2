"""Predicts how long an engine's steps take, from four numbers or from a recorded run of your own engine."""

from blockyard.tools.replay.engine import StepTime
from blockyard.tools.replay.step_time.linear import LinearStepTime
from blockyard.tools.replay.step_time.run import EngineLimits, EngineRun
from blockyard.tools.replay.step_time.serve import ServedRun, serve

__all__ = ["EngineLimits", "EngineRun", "LinearStepTime", "ServedRun", "StepTime", "serve"]
