"""Secrets in URLs stand in no message, log line, repr, metric or trace, whatever is wrong with the URL or the store."""

from __future__ import annotations

import ast
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from memory_stores import KeyedStore
from prometheus_client import CollectorRegistry, generate_latest
from spans import Spans

from blockyard import KVCache, KVLayout, tracing
from blockyard.errors import BlockyardError, InvalidArgumentError, StoreError
from blockyard.executor import StepExecutor
from blockyard.metrics import Collector
from blockyard.stores import StoreURL, open_store, opening
from blockyard.stores.adapters.objects import about_store, check_place
from blockyard.stores.object_store import _CONFIG, read_url
from blockyard.stores.redis import read_url as read_redis_url
from blockyard.stores.url import hide_secrets, public_repr, public_url, require_room, secrets_of, sized_url

SECRET = "hunter2SECRET"
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
SIZE = LAYOUT.bytes_per_block
SCHEMES = sorted({*opening._BUILT_IN, "mine", "unknown", ""})
NAMES = (
    *("password", "auth", "token", "sas_token", "aws_secret_access_key", "sse_customer_key_base64", "master_key"),
    *("service_account", "bearer_token", "key", "KEY", "anything", "pw", "%70assword", ""),
)
PIECES = st.text("abz019/?#@:&=%+ []'\"\\", max_size=6)
SECRETS = st.builds("{}{}{}".format, PIECES, st.just(SECRET), PIECES)


@st.composite
def urls(draw: st.DrawFn) -> str:
    """URLs of every scheme, with secrets in the user name, the password, and options, well escaped and not."""
    kind = draw(st.sampled_from(SCHEMES))
    start = draw(st.sampled_from([f"{kind}://", f"{kind}://", f"{kind}:", f"{kind}:///"])) if kind else ""
    secret = draw(SECRETS)
    secret = draw(st.sampled_from([secret, quote(secret, safe="")]))
    place = draw(st.sampled_from(["", "host", "host:6379", "[::1]:6379", "[", "127.0.0.1:70000", "/dir"]))
    users = [f"{secret}@", f":{secret}@", f"me:{secret}@", f"{secret}:me@", ""]
    user = "" if kind in {"file", "local"} else draw(st.sampled_from(users))  # theirs is part of a path
    options = [draw(st.sampled_from(["size=1MiB", "size=1", "size=x", "db=-1", "ttl=%ff", "size=1&size=2", "x"]))]
    name = draw(st.sampled_from(NAMES))
    value = draw(SECRETS)
    if not user or draw(st.booleans()):
        options.append(f"{name}={quote(value, safe='') if draw(st.booleans()) else value}")
    if draw(st.booleans()):
        options.append(f"endpoint=http://u:{quote(secret, safe='')}@127.0.0.1:1")
    end = draw(st.sampled_from(["", f"#{SECRET}"]))
    return f"{start}{user}{place}{draw(st.sampled_from(['', '/', '/bucket']))}?{'&'.join(options)}{end}"


def told(error: BaseException | None) -> str:
    """All that an error and the errors before it say, those that a traceback hides included."""
    text = ""
    while error is not None:
        text += "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
        error = error.__cause__ or error.__context__
    return text.replace("\n", " ")


def tell(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """What a call returns or raises."""
    try:
        return repr(call(*args, **options))
    except (BlockyardError, ValueError) as error:
        return told(error.with_traceback(None))


@example(f"redis://:{SECRET}/x@127.0.0.1:1?size=1MiB")
@example(f"redis://:{SECRET}?x@127.0.0.1:1?size=1MiB")
@example(f"redis://:x#{SECRET}@127.0.0.1:1?size=1MiB")
@example(f"redis://:{SECRET}")
@example(f"redis://a:70\u2a74{SECRET}@host")
@example(f"{SECRET}@host:6379")
@example(f"az://c?size=1MiB&master_key={SECRET}")
@example(f'gs://b?size=1MiB&service_account={{"k":"{SECRET}"}}')
@given(urls())
def test_whatever_is_wrong_with_a_url_no_message_shows_its_secrets(url: str):
    shown = [
        public_url(url),
        tell(opening.check_url, url),
        tell(StoreURL.parse, url),
        tell(read_redis_url, url),
        tell(read_url, url) if url.partition(":")[0] in (*_CONFIG, "local", "memory") else "",
        tell(require_room, url, 1 << 30),
        tell(lambda: sized_url(f"{url}&size=1", "space", 7) and None),  # returns a URL, or raises
        tell(check_place, "/dir", url, None),
        tell(check_place, url, None, None),
        tell(check_place, None, url, 7),
        public_repr([url]),
    ]
    assert SECRET not in "\n".join(shown), shown
    assert public_url(public_url(url)) == public_url(url)


@given(st.text(min_size=1), st.sampled_from(["{}", "got '{}'", "http://u:{}@host/ failed"]))
def test_a_secret_is_hidden_however_it_is_escaped(secret: str, text: str):
    marked = f"{SECRET}{secret}"
    for form in (marked, quote(marked), quote(marked, safe=""), repr(marked), " ".join(marked.split())):
        assert SECRET not in hide_secrets(text.format(form), [marked, secret[:1]])


def test_the_secrets_of_a_url_are_its_user_its_password_and_options_named_like_one():
    found = secrets_of("mine://me:p%40ss@host/dir?size=1GiB&token=a%2Fb&dir=/x")
    assert {"me", "p@ss", "p%40ss", "a/b", "a%2Fb"} <= set(found)
    assert not {"1GiB", "/x", "host"} & set(found)


class Telling(KeyedStore):
    """A plug-in whose every error quotes its URL."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url=url, **options)
        self.before = self._fail

    def _fail(self, name: str) -> None:
        try:
            raise OSError(f"{name}: no way to {self.url}")
        except OSError as error:
            raise ConnectionError(f"{name} failed for {self.url.partition('://')[2]}") from error


def dead(folder: Path) -> Iterator[tuple[str, str]]:
    """URLs of each kind of store, and options of `open_store`; none of their servers answers."""
    secret = quote(f"{SECRET}/?#", safe="")
    yield f"telling://me:{secret}@host?token={secret}&level=3", ""
    for scheme in ("redis", "rediss", "redis+cluster", "valkey"):
        yield f"{scheme}://me:{secret}@127.0.0.1:1?size=1MiB&timeout_base=.05", ""
    yield f"unix://me:{secret}@{folder}/no.sock?size=1MiB&timeout_base=.05", ""
    yield "s3://bucket?size=1MiB&endpoint=http://127.0.0.1:1&region=x&timeout_base=.05", "AWS_SECRET_ACCESS_KEY"
    yield "s3://bucket?size=1MiB&endpoint=http://127.0.0.1:1&region=x&timeout_base=.05", "AWS_SSE_CUSTOMER_KEY_BASE64"
    yield "s3://bucket?size=1MiB&region=x&timeout_base=.05", "AWS_ENDPOINT_URL"
    yield (
        "az://bucket?size=1MiB&account_name=a&endpoint=http://127.0.0.1:1&timeout_base=.05",
        "AZURE_STORAGE_ACCOUNT_KEY",
    )
    yield "gs://bucket?size=1MiB&base_url=http://127.0.0.1:1&timeout_base=.05", "GOOGLE_SERVICE_ACCOUNT_KEY"
    for scheme in ("local", "file", "memory"):
        yield f"{scheme}://{folder}/store?size=1MiB&token={secret}", ""


@pytest.mark.parametrize("number", range(14))
def test_a_store_that_cannot_be_opened_shows_no_secret(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
):
    kinds = list(dead(tmp_path))
    assert len(kinds) == 14
    url, variable = kinds[number]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    if variable:
        monkeypatch.setenv(variable, f"http://u:{SECRET}@127.0.0.1:1" if "URL" in variable else f"{SECRET}")
    monkeypatch.setitem(opening._registered, "telling", Telling)
    with caplog.at_level(logging.DEBUG):
        shown = tell(open_store, url, bytes_per_block=SIZE, use="prefix")
    assert "Telling(" in shown or "Error" in shown
    assert SECRET not in shown + caplog.text + "".join(capfd.readouterr()), shown


def test_no_log_line_repr_metric_or_trace_of_a_cache_shows_a_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(opening._registered, "telling", Telling)
    spans = Spans()
    tracing.instrument(spans.provider)
    url = f"telling://me:{quote(SECRET + '/', safe='')}@host?token={SECRET}"
    registry = CollectorRegistry()
    options: Any = {"prefix_caching": True, "namespace": b"test"}
    try:
        with (
            caplog.at_level(logging.DEBUG),
            KVCache(LAYOUT, device_blocks=8, swap_store=url, prefix_store=url, **options) as cache,
        ):
            registry.register(Collector(cache))
            assert cache.prefix_store is not None
            assert cache.swap_store is not None
            fetch = cache.prefix_store.prefetch(list(range(9)))
            assert cache.prefix_store.wait(60, until=lambda: fetch.done)
            sequence = cache.manager.allocate(list(range(9)))
            with cache.step():
                cache.manager.mark_computed([sequence])
            assert cache.prefix_store.wait(60)
            cache.manager.swap_out(sequence, to="external")
            with cache.step():
                pass
            cache.drain()
            with pytest.raises(StoreError, match="forget was not confirmed") as caught:
                cache.prefix_store.store.forget()
            shown = [repr(cache), repr(cache.prefix_store), repr(cache.health()), repr(cache.stats())]
            shown += [repr(store.stats()) for store in (cache.prefix_store, cache.prefix_store.store, cache.swap_store)]
            shown += [told(caught.value), generate_latest(registry).decode(), caplog.text]
            shown += [repr(vars(record)) for record in caplog.records]
            shown.append(about_store(cache.swap_store, url, bytes(32)))
            with pytest.raises(InvalidArgumentError) as refused:
                StepExecutor(cache.engine, store=url)  # type: ignore[arg-type]
            shown.append(told(refused.value))
        assert spans.ended
        shown += [span.to_json() for span in spans.ended]
    finally:
        tracing.uninstrument()
    text = "\n".join(shown)
    assert text.count("no way") + text.count("failed for") > 2
    assert SECRET not in text, text[max(0, text.find(SECRET) - 200) : text.find(SECRET) + 50]


def test_every_option_that_is_passed_to_obstore_is_known_to_it_and_none_makes_it_panic():
    """obstore panics at some values of unknown options."""
    for scheme, names in _CONFIG.items():
        for name in names:
            for value in ("x", "true", "http://[", "a\u00e9"):
                more = "&account_name=a" if scheme == "az" and name != "account_name" else ""
                shown = tell(
                    open_store,
                    f"{scheme}://b?size=1MiB&timeout_base=.05{more}&{name}={quote(value)}",
                    bytes_per_block=0,
                )
                assert "must be at least 1" in shown


def test_no_generated_repr_shows_a_url():
    """A dataclass or a NamedTuple with a URL shows it, unless it defines `__repr__` or hides the field."""
    found = []
    for path in (Path(opening.__file__).parents[1]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                named = [one for one in fields if ast.unparse(one.target) in {"url", "swap_store", "prefix_store"}]
                texts = [ast.unparse(one) for one in named]
                is_shown = any(re.match(r"url:|\w+: str\b(?!.*repr=False)", text) for text in texts)
                has_own = any(isinstance(one, ast.FunctionDef) and one.name == "__repr__" for one in node.body)
                found += [f"{path.name}: {node.name}"] if is_shown and not has_own else []
    assert found == ["url.py: StoreURL"], "its URL is public_url's"
