"""The step executor: carries out decisions with a copy engine and an external store, on one rank or on all."""

from blockyard.executor.executor import Executor, StepDone, StepExecutor
from blockyard.executor.parallel import ParallelExecutor
from blockyard.executor.remote import RemoteExecutor, serve_executor

__all__ = ["Executor", "ParallelExecutor", "RemoteExecutor", "StepDone", "StepExecutor", "serve_executor"]
