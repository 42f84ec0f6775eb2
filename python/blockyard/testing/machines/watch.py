"""`TicketWatch` and `SequenceWatch`: check a scheduler's manager calls against what it executes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockyard._core import BlockManager, HashedPrompt, Pairs, StepDecision
from blockyard.errors import BlockyardError
from blockyard.scheduler import Request
from blockyard.testing.machines.record import CallRecord, show
from blockyard.testing.machines.side_by_side import MAX_OPEN
from blockyard.testing.machines.values import Key, Keyed, seen, token_of
from blockyard.testing.memory import EMPTY, LOST, LateMemory

__all__ = ["DueHits", "Followed", "SequenceWatch", "Ticket", "TicketWatch", "common", "holds"]

KEPT = 16
"""Number of finished requests that new prompts are compared with."""


@dataclass(slots=True)
class Ticket:
    """A decision taken from the manager."""

    decision: StepDecision
    step: int
    executed: int | None = None  # the step
    ended: str = ""  # how
    losses: tuple[Pairs, ...] = ()


@dataclass(slots=True)
class Followed:
    """A sequence, as the manager knows it."""

    opened: int  # the step
    tokens: list[int | None]  # None: the manager does not know the id
    told: list[str]  # for each token: the call that named it
    key: Key
    request: str = ""
    freed: int | None = None
    lost: str = ""  # the call that reported the loss
    table: tuple[int, ...] = ()  # last one seen


class TicketWatch(CallRecord):
    """Follows the tickets of a scheduler under test, and ends their transfers no sooner than the scheduler does.

    Attributes:
        memory: the memory that decisions run on.
    """

    memory: LateMemory

    def __init__(self) -> None:
        super().__init__()
        self.tickets: dict[int, Ticket] = {}

    # ---- calls of the manager ----

    def before(self, name: str, arguments: dict[str, Any], text: str) -> None:
        """Reject a ticket that ends too early or never."""
        if name == "complete":
            self._complete(int(arguments["ticket"]), list(arguments.get("lost", ())), text)
        elif name == "take_decision" and len(self.open_tickets()) >= MAX_OPEN:
            raise AssertionError(f"step {self.step}: {self.open_ticket()}")
        elif name == "fail" and arguments["ticket"] in self.tickets:
            self._abandon(int(arguments["ticket"]), text)

    def after(self, name: str, arguments: dict[str, Any], result: Any) -> None:  # noqa: ARG002 (for `SequenceWatch`)
        """Follow what a call has changed."""
        if name == "take_decision":
            self.tickets[result.ticket] = Ticket(result, self.step)

    def sentence(self, error: BaseException) -> str:
        """Describe an error, with the state of the ticket or sequences that its call names."""
        text = super().sentence(error)
        if self._refused is None or self._refused[0] is not error:
            return text
        return "; ".join([text, *self.known(self._refused[2])])

    def known(self, arguments: dict[str, Any]) -> list[str]:
        """Describe the ticket that a call names."""
        number = arguments.get("ticket", -1)
        ticket = self.tickets.get(number)
        if ticket is None:
            return []
        return [f"ticket {number} " + (f"had ended: {ticket.ended}" if ticket.ended else f"is of step {ticket.step}")]

    def _complete(self, ticket: int, lost: Sequence[Pairs], text: str) -> None:
        taken = self.tickets.get(ticket)
        if taken is None or taken.ended:
            return  # the manager refuses it
        if taken.executed is None and len(taken.decision):
            raise AssertionError(
                f"step {self.step}: {text} came before execute(decision): "
                f"of ticket {ticket} nothing has run, {show(taken.decision)}"
            )
        named = {(pairs.src, pairs.dst, *ids) for pairs in lost for ids in pairs.ids.tolist()}
        missing = [p for p in taken.losses if (p.src, p.dst, *p.ids[0].tolist()) not in named]
        if missing:
            raise AssertionError(
                f"step {self.step}: {text} leaves out what execute returned as lost: {', '.join(map(show, missing))}"
            )
        taken.ended = f"{text} in step {self.step}"
        if taken.executed is not None:
            self.memory.finish(ticket)

    def _abandon(self, ticket: int, text: str) -> None:
        taken = self.tickets[ticket]
        if not taken.ended:
            taken.ended = f"{text} in step {self.step}"
            if taken.executed is not None:
                self.memory.abandon(ticket)

    # ---- tickets ----

    def execute(self, decision: StepDecision, losses: Sequence[Pairs]) -> None:
        """Begin a decision's transfers: loads and copies run now, the others may be delayed until its ticket ends."""
        ticket = decision.ticket
        taken = self.tickets.get(ticket)
        if taken is None:
            raise AssertionError(f"step {self.step}: execute got ticket {ticket}, which the manager has not handed out")
        if taken.executed is not None:
            raise AssertionError(
                f"step {self.step}: execute(decision) ran ticket {ticket} twice, before in step {taken.executed}"
            )
        if taken.ended:
            raise AssertionError(f"step {self.step}: execute(decision) of ticket {ticket} came after {taken.ended}")
        if (decision.transfers(), decision.after) != (taken.decision.transfers(), taken.decision.after):
            raise AssertionError(
                f"step {self.step}: execute got another decision of ticket {ticket} than take_decision returned: "
                f"{show(decision)}; wanted {show(taken.decision)}"
            )
        before = {number: self.tickets[number] for number in decision.after if number != ticket}
        early = [number for number, other in before.items() if other.executed is None and not other.ended]
        if early:
            raise AssertionError(
                f"step {self.step}: ticket {ticket} runs after ticket {early[0]} of step {before[early[0]].step}, "
                f"which was never executed"
            )
        taken.executed, taken.losses = self.step, tuple(losses)
        self.counts["blocks swapped"] += sum(map(len, (*decision.swap_out, *decision.swap_in)))
        self.counts["blocks lost"] += len(losses)
        loads = [pairs for pairs in decision.swap_in if pairs.dst == "device" and not decision.prefetch]
        self.memory.submit(decision, {int(block) for pairs in loads for block in pairs.ids[:, 1]}, losses)

    def open_tickets(self) -> list[int]:
        """Return the tickets neither completed nor failed, oldest first."""
        return [number for number, ticket in self.tickets.items() if not ticket.ended]

    def open_ticket(self) -> str:
        """Name the oldest open ticket."""
        oldest = self.open_tickets()[0]
        ticket = self.tickets[oldest]
        done = "was never executed" if ticket.executed is None else f"was executed in step {ticket.executed}"
        return (
            f"ticket {oldest} of step {ticket.step} {done} and was neither completed nor failed, "
            f"{len(self.open_tickets())} tickets are open: call complete(ticket={oldest}, lost=...)"
        )


class SequenceWatch(TicketWatch):
    """Follows sequences as well as tickets.

    Attributes:
        manager: the manager under the scheduler.
        texts: all tokens of each sequence of a request, prompt first, as with unlimited memory.
        keyed: which parts of `Key` the requests have.
        keys: the key of each request.
        hits: which prompts should hit the prefix cache.
        writers: last writer of each device block.
    """

    manager: BlockManager

    def __init__(self) -> None:
        super().__init__()
        self.sequences: dict[int, Followed] = {}
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.keyed: frozenset[str] = frozenset()
        self.keys: dict[str, Key] = {}
        self.hits = DueHits(self)
        self.writers: dict[int, str] = {}
        self._hashed: dict[int, tuple[HashedPrompt, list[int | None], Key]] = {}  # by id, which is kept alive

    # ---- calls of the manager ----

    def before(self, name: str, arguments: dict[str, Any], text: str) -> None:
        """Also reject tokens marked as computed too early."""
        super().before(name, arguments, text)
        if name == "mark_computed" and self.manager.prefix.enabled:
            self._mark(arguments, text)
        elif name == "allocate":
            self.hits.before(*self._prompts(arguments))

    def after(self, name: str, arguments: dict[str, Any], result: Any) -> None:
        """Follow what a call has changed."""
        super().after(name, arguments, result)
        follow = getattr(self, f"_after_{name}", None)
        if follow is not None:
            follow(arguments, result)
        elif name in ("complete", "fail", "lose"):
            for handle in handles(result):
                if handle in self.sequences:
                    self.sequences[handle].lost = f"{name}(ticket={arguments['ticket']}) in step {self.step}"

    def known(self, arguments: dict[str, Any]) -> list[str]:
        """Describe the sequences and the ticket that a call names."""
        named = handles(arguments.get("sequences", arguments.get("sequence", ())))
        known = [handle for handle in named if handle in self.sequences]
        states = {handle: self.state(handle) for handle in known}
        gone = [f"sequence {h} {text}" for h, text in states.items() if len(known) == 1 or "on the device" not in text]
        return [*gone, *super().known(arguments)]

    def _mark(self, arguments: dict[str, Any], text: str) -> None:
        batch = handles(arguments["sequences"])
        counts = arguments.get("num_computed")
        for row, handle in enumerate(batch):
            try:
                if self.manager.tier(handle) != "device":
                    continue
                table = self.blocks(handle)
                length = self.manager.num_tokens(handle) if counts is None else int(np.atleast_1d(counts)[row])
                found = list(map(token_of, self.memory.read(table, length)))
            except BlockyardError:
                continue  # the manager refuses it
            size = self.memory.block_size
            wrong = next((at for at, token in enumerate(found) if token in (EMPTY, LOST)), None)
            if wrong is None and not any(whole[:length] == found for whole in self.texts.values()):
                best = max((common(found, whole) for whole in self.texts.values()), default=0)
                wrong = min(best, length - 1)
            if wrong is not None:
                raise AssertionError(
                    f"step {self.step}: {text}: token {wrong} of {self.name(handle)} is not computed yet, "
                    f"its slot {table[wrong // size] * size + wrong % size} (block {table[wrong // size]}) "
                    f"{holds(found[wrong])}"
                )

    def _after_allocate(self, arguments: dict[str, Any], result: Any) -> None:
        opened = handles(result)
        texts, keys = self._prompts(arguments)
        if not texts:  # a call of the manager's own
            texts = [[None] * length for length in map(self.manager.num_tokens, opened)]
            keys = [Key()] * len(texts)
        for handle, text, key in zip(opened, texts, keys, strict=True):
            self.sequences[handle] = Followed(self.step, text, [f"allocate in step {self.step}"] * len(text), key)
        results = result if isinstance(result, tuple) else (result,)
        if self.manager.prefix.enabled and any(isinstance(r, int) and not hasattr(r, "cached_tokens") for r in results):
            raise AssertionError(
                f"step {self.step}: allocate returned {show(result)} without cached_tokens: as the manager's "
                f"prefix.enabled is true, each sequence must be an int with this attribute"
            )
        hits = [int(getattr(sequence, "cached_tokens", 0)) for sequence in results]
        self.counts["tokens hit"] += sum(hits)
        self.hits.after(opened, hits)

    def _after_hash(self, arguments: dict[str, Any], result: Any) -> None:
        key = self._key(arguments.get("salt"), arguments.get("lora_id"), arguments.get("extras"))
        self._hashed[id(result)] = (result, _tokens(arguments["token_ids"]), key)

    def _prompts(self, arguments: dict[str, Any]) -> tuple[list[list[int | None]], list[Key]]:
        """Return tokens and key of each prompt of `allocate`."""
        prompts = arguments.get("prompts") or list(map(int, np.atleast_1d(arguments.get("counts") or [])))
        extras = arguments.get("extras") or ()
        if all(extra and isinstance(extra[0], int) for extra in extras):
            extras = [extras] * len(prompts)
        given = zip(*(_each(arguments.get(name), len(prompts)) for name in ("salt", "lora_id")), extras, strict=False)
        texts, keys = list(map(_tokens, prompts)), [self._key(*parts) for parts in given]
        for row, prompt in enumerate(prompts):
            if isinstance(prompt, HashedPrompt):
                if id(prompt) not in self._hashed:
                    raise AssertionError(
                        f"step {self.step}: allocate got prompts[{row}], a HashedPrompt that prefix.hash of the "
                        f"manager under test has not returned"
                    )
                _, texts[row], keys[row] = self._hashed[id(prompt)]
        return texts, keys

    def _key(self, salt: Any, lora_id: Any, extras: Any) -> Key:
        """Return the key that a call gives, as far as the requests have one."""
        return self.key_of(Key(salt, int(lora_id or 0), tuple(extras or ())))

    def key_of(self, request: Keyed) -> Key:
        """Return the part of a key that the requests have."""
        return Key(
            request.salt if "salt" in self.keyed else None,
            request.lora_id if "lora_id" in self.keyed else 0,
            tuple(sorted((start, length, digest) for start, length, digest in request.extras))
            if "extras" in self.keyed
            else (),
        )

    def _after_fork(self, arguments: dict[str, Any], result: Any) -> None:
        parent, shared = self.sequences[int(arguments["sequence"])], arguments.get("shared_tokens")
        rest = 0 if shared is None else int(arguments["num_tokens"]) - int(shared)
        for handle in handles(result):
            tokens, told = [*parent.tokens[:shared], *[None] * rest], [*parent.told[:shared], *[""] * rest]
            self.sequences[handle] = Followed(self.step, tokens, told, parent.key)

    def _after_truncate(self, arguments: dict[str, Any], _: Any) -> None:
        followed, kept = self.sequences[int(arguments["sequence"])], int(arguments["num_tokens"])
        del followed.tokens[kept:], followed.told[kept:]

    def _after_free(self, arguments: dict[str, Any], _: Any) -> None:
        for handle in handles(arguments["sequences"]):
            self.sequences[handle].freed = self.step

    def _after_append(self, arguments: dict[str, Any], _: Any) -> None:
        batch = handles(arguments["sequences"])
        counts = _counts(arguments.get("num_tokens"), len(batch))
        ids = arguments.get("token_ids")
        tokens = [None] * sum(counts) if ids is None else list(map(int, ids))
        for handle, count in zip(batch, counts, strict=True):
            followed = self.sequences[handle]
            new, tokens = tokens[:count], tokens[count:]
            # The ids of a prompt chunk were given when the sequence was opened.
            more = max(0, self.manager.num_tokens(handle) - len(followed.tokens))
            followed.tokens += new[count - more :]
            followed.told += [f"append(sequences={show(batch)}, token_ids={show(new)}) in step {self.step}"] * more

    def _after_note_tokens(self, arguments: dict[str, Any], _: Any) -> None:
        batch, ids = handles(arguments["sequences"]), list(map(int, arguments["token_ids"]))
        for handle, count in zip(batch, _counts(arguments.get("num_tokens"), len(batch)), strict=True):
            followed = self.sequences[handle]
            first = followed.tokens.index(None) if None in followed.tokens else len(followed.tokens)
            new, ids = ids[:count], ids[count:]
            followed.tokens[first : first + count] = new
            followed.told[first : first + count] = [
                f"note_tokens(sequences={show(batch)}, token_ids={show(new)}) in step {self.step}"
            ] * count

    # ---- sequences ----

    def execute(self, decision: StepDecision, losses: Sequence[Pairs]) -> None:
        """Begin a decision's transfers, and record the blocks they write."""
        super().execute(decision, losses)
        for kind, pairs in decision.transfers():
            for a, b in pairs.ids.tolist() if pairs.dst == "device" else ():
                self.writers[b] = (
                    f"{kind} {pairs.src} {a} -> device {b} of ticket {decision.ticket} in step {self.step}"
                )

    def live(self) -> list[int]:
        """Return the sequences that are not freed."""
        return [handle for handle, followed in self.sequences.items() if followed.freed is None]

    def name(self, handle: int) -> str:
        """Name a sequence and its request."""
        request = self.sequences[handle].request
        return f"sequence {handle}" + (f" (request {self.alike(request)})" if request else "")

    def state(self, handle: int) -> str:
        """Describe where a sequence is."""
        followed = self.sequences[handle]
        owner = f" for request {self.alike(followed.request)}" if followed.request else ""
        if followed.freed is not None:
            return f"was opened in step {followed.opened}{owner} and freed in step {followed.freed}"
        if followed.lost:
            return f"has lost bytes, {followed.lost} returned it: free it and start again"
        return f"was opened in step {followed.opened}{owner} and is on the {self.manager.tier(handle)}"

    def last_of(self, request: str) -> str:
        """Describe a request by what became of its last sequence."""
        own = [handle for handle, followed in self.sequences.items() if followed.request == request]
        if not own:
            return f"{self.alike(request)}, for which forward has computed no sequence"
        state = self.state(own[-1]).replace(f" for request {self.alike(request)}", "")
        return f"{self.alike(request)}, whose sequence {own[-1]} {state}"

    def alike(self, request: str) -> str:
        """Name a request, and others with the same tokens."""
        text, key = self.texts.get((request, 0)), self.keys.get(request)
        others = [
            name
            for (name, index), whole in self.texts.items()
            if name != request and index == 0 and whole == text and self.keys.get(name) == key
        ]
        if not others:
            return repr(request)
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"{request!r} (equal tokens: {', '.join(map(repr, others[-3:]))}{more})"

    def culprit(self, live: Iterable[str]) -> str:
        """Name what keeps requests from finishing, if known."""
        live = set(live)
        for handle in self.live():
            if self.sequences[handle].lost:
                return f"{self.name(handle)} {self.state(handle)}: "
        if self.open_tickets():
            return f"{self.open_ticket()}: "
        for handle in self.live():
            followed = self.sequences[handle]
            if followed.request and followed.request not in live:
                where = self.manager.tier(handle)
                return f"{self.name(handle)} was not freed and holds {where} blocks {show(self.blocks(handle))}: "
        return ""

    def blocks(self, handle: int) -> list[int]:
        """Return the block table of a sequence; empty if the manager refuses."""
        try:
            return [int(block) for block in self.manager.block_table(handle)]
        except BlockyardError:
            return []


class DueHits:
    """Follows which prompts should hit when they are first allocated.

    These begin with a block that a finished request has computed under the same key, and that the device still holds:
    no sequence has got it since for other tokens.

    Attributes:
        missed: the last due prompt without a hit, in words, and the steps up to it.
    """

    def __init__(self, watch: SequenceWatch) -> None:
        self.missed: tuple[str, str] | None = None
        self._watch = watch
        self._new: dict[str, Request] = {}
        self._finished: list[Request] = []
        self._prompts: list[tuple[Request, str] | None] = []  # of the current call, with why each should hit

    def add(self, request: Request) -> None:
        """Follow a new request."""
        self._new[request.request_id] = request

    def end(self, request: Request, *, finished: bool = True) -> None:
        """Take a finished request into account; drop an aborted one."""
        self._new.pop(request.request_id, None)
        if finished:
            self._finished = [*self._finished[1 - KEPT :], request]

    def before(self, texts: Sequence[Sequence[int | None]], keys: Sequence[Key]) -> None:
        """Find the prompts that should hit among those to be allocated."""
        self._prompts = []
        if self._watch.manager.prefix.enabled:
            found = [self._request_of(text, key) for text, key in zip(texts, keys, strict=True)]
            self._prompts = [None if request is None else (request, self._why(request)) for request in found]

    def after(self, handles: Sequence[int], hits: Sequence[int]) -> None:
        """Count the hits of the prompts that were allocated."""
        prompts, self._prompts = self._prompts, []
        for prompt, handle, hit in zip(prompts, handles, hits, strict=False):
            if prompt is None:
                continue
            request, why = prompt
            self._new.pop(request.request_id, None)
            if why:
                self._watch.counts["hits due"] += 1
                self._watch.counts["due hit"] += hit > 0
            if why and not hit:
                sentence = f"step {self._watch.step}: allocate hit nothing for sequence {handle}: {why}"
                self.missed = (self._watch.headline(sentence), self._watch.timeline())

    def _request_of(self, text: Sequence[int | None], key: Key) -> Request | None:
        """Return the new request that a prompt, its first part, or its length belongs to."""
        for name, request in self._new.items():
            prompt = list(request.prompt)
            if None in text:
                same = len(text) == len(prompt)
            else:
                same = self._watch.keys[name] == key and prompt[: len(text)] == list(text)
            if same and (len(text) == len(prompt) or len(text) > self._watch.memory.block_size):
                return request
        return None

    def _why(self, request: Request) -> str:
        """Return why a request should hit, in words; empty if it need not."""
        size, key = self._watch.memory.block_size, self._watch.keys[request.request_id]
        first = list(request.prompt[:-1])[:size]
        for earlier in self._finished if len(first) == size else ():
            if list(earlier.prompt[:size]) == first and self._watch.keys[earlier.request_id] == key:
                blocks = self._blocks_with(first, key)
                if blocks:
                    return (
                        f"its request {request.request_id!r} begins with the tokens {show(first)} of the finished "
                        f"request {earlier.request_id!r}, and block {blocks[0]} holds them"
                    )
        return ""

    def _blocks_with(self, first: list[int], key: Key) -> list[int]:
        """Return the blocks that hold the first tokens of a prompt, and are in no sequence for other tokens."""
        watch, size = self._watch, len(first)
        values = np.array(seen(key, first))
        found: list[int] = np.flatnonzero((watch.memory.tiers["device"] == values).all(1)).tolist()
        if found:
            for handle in watch.live():
                blocks, followed = watch.blocks(handle), watch.sequences[handle]
                same = followed.key == key and followed.tokens[:size] == first
                if watch.manager.tier(handle) == "device":
                    found = [block for block in found if block not in blocks[int(same) :]]
        return found


def holds(token: int) -> str:
    """Describe the content of a slot."""
    return {EMPTY: "was never written", LOST: "was lost by a transfer"}.get(token, f"holds token {token_of(token)}")


def handles(given: Any) -> list[int]:
    """Convert handles from any form that the manager's calls accept or return."""
    if isinstance(given, list | tuple | np.ndarray):
        return [int(handle) for handle in given]
    return [int(given)]


def _counts(given: Any, rows: int) -> list[int]:
    if given is None or isinstance(given, int):
        return [1 if given is None else given] * rows
    return [int(count) for count in np.broadcast_to(given, rows)]


def _each(given: Any, count: int) -> list[Any]:
    return list(given) if isinstance(given, list | tuple | np.ndarray) else [given] * count


def _tokens(prompt: Any) -> list[int | None]:
    if isinstance(prompt, int):
        return [None] * prompt
    return list(map(int, prompt)) if hasattr(prompt, "__iter__") else [None] * len(prompt)


def common(found: Sequence[int], whole: Sequence[int]) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(found, whole, strict=False)) if a != b), min(len(found), len(whole)))
