"""The step executor: carries a decision out with a copy engine and an external store."""

from blockyard.executor.executor import Executor, StepDone, StepExecutor

__all__ = ["Executor", "StepDone", "StepExecutor"]
