"""An executor in a worker process: `RemoteExecutor` is the client, `serve_executor` the server.

They communicate over a `multiprocessing.connection.Connection`, which unpickles what it reads: connect only processes
that trust each other, such as a process and its children.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn

from blockyard._core import Pairs, StepDecision
from blockyard.errors import BlockyardError, StoreError, UnknownTicketError, WorkerError
from blockyard.executor.executor import Executor, StepDone, all_lost, engine_sizes
from blockyard.workers.ownership import Process

__all__ = ["ANSWER_SECONDS", "RemoteExecutor", "serve_executor"]

ANSWER_SECONDS: Final = 120.0
"""How long a worker may take to answer; longer than its store's deadlines."""

_CALLS: Final = frozenset({"lost", "is_awaited", "poll", "collect", "wait", "give_up_all", "sizes"})


class RemoteExecutor(Executor):
    """Carries out decisions in a worker process.

    A worker cannot recover: once it has exited, failed or missed a deadline, every call raises. The same holds after an
    exception from outside, such as `KeyboardInterrupt`, ended a call before the worker's answer. In a fork of the
    process that created it, every call raises `ForkedError`: its requests would mix with those of that process.

    Args:
        connection: to a process that runs `serve_executor` over the other end.
        name: name of the worker, for messages.
        timeout: maximum seconds to wait for an answer.
    """

    def __init__(self, connection: Connection, *, name: str = "the worker", timeout: float = ANSWER_SECONDS) -> None:
        self.name = name
        self._process = Process(f"the connection to {name}")
        self._connection = connection
        self._timeout = timeout
        self._is_asked = False
        self._failure = ""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot copy or pickle the connection to {self.name}: both copies would close it")

    def submit(self, decision: StepDecision, *, by_layer: bool = False) -> None:
        """Start carrying out a decision; returns at once. If the worker refuses it, all of it is reported as lost."""
        self._send("submit", decision.to_bytes(), by_layer)

    def wait_for_layer(self, ticket: int, layer: int) -> None:
        """Do nothing: the worker's own compute waits for its loads."""

    def lost(self, ticket: int) -> tuple[Pairs, ...]:
        """Return the pairs known so far to be lost."""
        lost: tuple[Pairs, ...] = self.begin("lost", ticket)()
        return lost

    def is_awaited(self, ticket: int) -> bool:
        """Whether a running decision must end before its step's results are valid."""
        return bool(self.begin("is_awaited", ticket)())

    def poll(self) -> list[StepDone]:
        """Return the decisions that ended since the last call."""
        ended: list[StepDone] = self.begin("poll")()
        return ended

    def collect(self, ticket: int) -> list[StepDone]:
        """Return the decisions that ended since the last call, including this one if it is awaited."""
        ended: list[StepDone] = self.begin("collect", ticket)()
        return ended

    def wait(self, ticket: int) -> StepDone:
        """Wait for a decision to end.

        Raises:
            UnknownTicketError: no such decision is open.
        """
        done: StepDone = self.begin("wait", ticket)()
        return done

    def give_up_all(self) -> None:
        """Make the worker count all running decisions as lost, once nothing moves."""
        self.begin("give_up_all")()

    def tell(self, message: object) -> None:
        """Make the worker call its `run` with a message, after earlier requests; the result is dropped."""
        self._send("tell", message)

    def ask(self, message: object) -> Any:
        """Make the worker call its `run` with a message, and return the result."""
        return self.begin("ask", message)()

    def begin(self, name: str, *arguments: object) -> Callable[[], Any]:
        """Send a request now and read the answer later, so that several workers run concurrently.

        Args:
            name: a method of this class that returns a result, or "sizes": the `engine_sizes` of the worker.
            arguments: its arguments.

        Returns:
            A function that waits for the answer and returns it. Call it before the next `begin`.
        """
        self._process.check()
        if self._is_asked and not self._failure:
            self._failure = f"a call of {self.name} was interrupted before its answer: restart the worker"
        self._send(name, *arguments)
        self._is_asked = True
        return self._answer

    def _send(self, *message: object) -> None:
        self._process.check()
        if self._failure:
            raise WorkerError(self._failure)
        try:
            self._connection.send(message)
        except OSError:
            self._receive()  # its last message before it exited

    def _answer(self) -> Any:
        self._process.check()
        kind, value = self._receive()
        self._is_asked = False
        if kind == "unknown":
            raise UnknownTicketError(f"{self.name}: {value}")
        return _with_errors(value, lambda error: f"{self.name}: {error}") if kind == "answer" else value

    def _receive(self) -> tuple[str, Any]:
        """Read one answer.

        Raises:
            WorkerError: there is none, or it reports that the worker failed.
        """
        failure = f"{self.name} has ended"
        with suppress(EOFError, OSError):
            if self._connection.poll(self._timeout):
                kind, value = self._connection.recv()
                if kind != "failed":
                    return kind, value
                failure = f"{self.name} has failed: {value}"
            else:
                failure = f"{self.name} has not answered for {self._timeout:g} seconds"
        self._failure = failure
        raise WorkerError(failure)


def serve_executor(connection: Connection, executor: Executor, run: Callable[[Any, int], object] | None = None) -> None:
    """Serve the requests of a `RemoteExecutor` until it closes its end.

    Args:
        connection: to the `RemoteExecutor`.
        executor: carries out the decisions.
        run: called with each message of `RemoteExecutor.tell` and `ask`, and the ticket of the last submitted decision,
            for example to compute its step.

    Raises:
        Exception: raised by `executor` or `run`, other than for an invalid decision. The `RemoteExecutor` gets the
            error first.
    """
    worker = _Worker(executor, run)
    try:
        while True:
            try:
                name, *arguments = connection.recv()
            except (EOFError, ConnectionError):
                return
            answer = worker.answer(name, arguments)
            if answer is None:
                continue
            try:
                connection.send(answer)
            except ConnectionError:
                return
    except Exception as error:
        with suppress(OSError):
            connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise


class _Worker:
    """Answers requests with an executor; a decision that the executor refuses counts as ended and completely lost."""

    def __init__(self, executor: Executor, run: Callable[[Any, int], object] | None) -> None:
        self._executor = executor
        self._run = run
        self._ticket = 0
        self._refused: dict[int, StepDone] = {}

    def answer(self, name: str, arguments: list[Any]) -> tuple[str, object] | None:
        """Process one message; None if it needs no answer."""
        if name == "submit":
            self._submit(StepDecision.from_bytes(arguments[0]), by_layer=arguments[1])
            return None
        if name in {"tell", "ask"}:
            if self._run is None:
                raise WorkerError("received a message, but serve_executor was called without `run`")
            found = self._run(arguments[0], self._ticket)
            return ("result", found) if name == "ask" else None
        if name not in _CALLS:
            raise WorkerError(f"an executor has no call {name!r}")
        try:
            return "answer", _with_errors(self._call(name, *arguments), _text)
        except UnknownTicketError as error:
            return "unknown", str(error)

    def _submit(self, decision: StepDecision, *, by_layer: bool) -> None:
        self._ticket = decision.ticket
        try:
            self._executor.submit(decision, by_layer=by_layer)
        except BlockyardError as error:
            with suppress(UnknownTicketError):
                self._executor.wait(decision.ticket)
            self._refused[decision.ticket] = all_lost(decision, error)

    def _call(self, name: str, *arguments: Any) -> object:
        refused = self._refused
        if name == "give_up_all":
            return self._executor.give_up_all()
        if name == "sizes":
            return engine_sizes(self._executor)
        if name in {"poll", "collect"}:
            self._refused = {}
            return [*refused.values(), *getattr(self._executor, name)(*arguments)]
        ticket = arguments[0]
        if ticket not in refused:
            return getattr(self._executor, name)(ticket)
        if name == "wait":
            return refused.pop(ticket)
        return refused[ticket].lost if name == "lost" else True


def _with_errors(value: Any, change: Callable[[Exception], str]) -> Any:
    """Replace the errors in an executor's reports, since a plug-in's errors might not pickle."""
    if isinstance(value, list):
        return [_with_errors(done, change) for done in value]
    if isinstance(value, StepDone):
        return value._replace(errors=tuple(StoreError(change(error)) for error in value.errors))
    return value


def _text(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 (a plug-in's error)
        return type(error).__name__
