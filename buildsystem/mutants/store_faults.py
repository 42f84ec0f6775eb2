"""Faults for `python.py` in external stores; see `python_faults`."""

from __future__ import annotations

THREADED = (
    "stores/test_breaker.py",
    "stores/test_known_keys.py",
    "stores/test_threaded.py",
    "stores/test_batches.py",
    "stores/test_healing.py",
    "stores/test_epochs.py",
    "stores/test_failing_stores.py",
    "executor/test_late_stores.py",
    "services/test_many_processes.py",
)

# File, tests, and pairs of original and faulty text.
STORE_FAULTS: list[tuple[str, tuple[str, ...], list[tuple[str, str]]]] = [
    (
        "stores/adapters/objects.py",
        ("stores/test_objects.py",),
        [
            (
                "return _length(rows) == size and bool((rows[1:, :_HEADER]",
                "return _length(rows) == size or bool((rows[1:, :_HEADER]",
            ),
            ("                    row += count\n", ""),
            (
                "            if parts and (parts + count) * self._width > BATCH_BYTES:",
                "            if (parts + count) * self._width > BATCH_BYTES:",
            ),
            (
                "                    if ok.all() and _is_one(data, sizes[index]):",
                "                    if ok.all() or _is_one(data, sizes[index]):",
            ),
        ],
    ),
    (
        "stores/threaded/batches.py",
        THREADED,
        [
            ("            earlier.followers.append(batch)\n        batch.before = len(found)\n", "            pass\n"),
            (
                "                if self._last.get(name) is ended:\n                    del",
                "                if name in self._last:\n                    del",
            ),
            ("            if ended.before:  # what", "            if False:  # what"),
            ('if batch.ended and batch.kind == "put"', "if False"),
            ("            self._pause = min(2 * self._pause, _PAUSES[1])\n", ""),
            (
                "        was_down, self.is_down = self.is_down, self.is_down and not answered\n",
                "        was_down, self.is_down = self.is_down, False\n",
            ),
        ],
    ),
    (
        "stores/threaded/known_keys.py",
        THREADED,
        [
            ('        elif reason != "absent" and not is_damage(reason):', "        elif is_damage(reason):"),
            (
                "        elif not self.is_hidden(key):  # absent, or a damaged block that has been deleted\n",
                "        else:\n",
            ),
            ("        if seen and self._doubted.get(key) == seen:\n", "        if seen:\n"),
            ("        there = [time > since for time in times]\n", "        there = [time > -inf for time in times]\n"),
        ],
    ),
    (
        "stores/threaded/keyed_blocks.py",
        THREADED,
        [
            (
                "        if batch.age < self.epochs.age:  # it was submitted under an earlier epoch\n",
                "        if False:\n",
            ),
            ("        if batch.ended:  # the caller may have changed the rows since\n            return reasons\n", ""),
            (
                "        if not self.epochs.counts(epoch, stored) and self.confirm().token != epoch.token:",
                "        if False:",
            ),
            ('["lost" if key in late else "" for key in keys]', '["" for key in keys]'),
        ],
    ),
    (
        "stores/threaded/store.py",
        THREADED,
        [
            (
                "            if not batch.ended:\n                batch.digests",
                "            if True:\n                batch.digests",
            ),
            (
                '                self._give_up(batch, "unavailable" if batches.is_refused(batch) else "timeout")\n',
                "",
            ),
            (
                "            if error is not None and now - began >= _DEAR:",
                "            if error is not None and not began:",
            ),
            ("room = max(0, self.memory - pending)", "room = max(0, self.memory)"),
        ],
    ),
]
