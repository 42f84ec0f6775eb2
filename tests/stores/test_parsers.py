"""Parsers of URLs and of stored values meet random input: every answer is an error with a message, or a miss.

BLOCKYARD_FUZZ is how many inputs each gets. A million of both take some minutes:

    BLOCKYARD_FUZZ=1000000 pytest tests/stores/test_parsers.py
"""

import os
import random
import tracemalloc
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard._core import checksum_rows
from blockyard.errors import StoreURLError
from blockyard.stores import opening
from blockyard.stores.opening import check_url
from blockyard.stores.value import HEADER, check_parts, check_values, seal_values

INPUTS = int(os.environ.get("BLOCKYARD_FUZZ", "4000"))
PASSWORD = "hunter2-of-the-test"
URLS = (
    "file:///var/kv,/mnt/b?size=2GiB&direct=auto&threads=4&memory=1GiB&timeout_base=5",
    f"redis://user:{PASSWORD}@host:6379?size=2GiB&db=1&ttl=60&threads=4&memory=1GiB&timeout_base=.5",
    f"rediss://:{PASSWORD}@[::1]:6380/?ca=/etc/ca.pem&cert=%2Fc&key=/k",
    f"redis+cluster://:{PASSWORD}@a:7000?size=1.5TiB",
    f"valkeys://:{PASSWORD}@a?size=2GiB&ca=/etc/ca.pem",
    f"unix://user:{PASSWORD}@/run/redis.sock?db=0",
    "s3://bucket/prefix?size=1TiB&region=eu-west-1&endpoint=http://127.0.0.1:9000&connections=16",
    f"s3://bucket?aws_secret_access_key={PASSWORD}&size=1GiB",
    "gs://bucket/a%20b?size=500MB",
    f"az://container?account_name=a&sas_token={PASSWORD}",
    "local:///mnt/shared?size=1GiB",
    "memory://name?size=1",
    f"memory://name?size={'9' * 5000}",
)
PIECES = (
    *(
        "?",
        "&",
        "=",
        "#",
        "@",
        ":",
        "//",
        ",/",
        "%",
        "%00",
        "%ff",
        "%2f",
        "[",
        "]",
        "[::",
        "..",
        "\0",
        "\n",
        "\ud800",
        "\u0661",
    ),
    *(
        "9" * 50,
        "-1",
        "1e400",
        "nan",
        "inf",
        "0x10",
        "1_0",
        " ",
        "size=",
        "size=1GiB",
        "2G",
        "db=",
        "key",
        "",
        "\u00e9",
        "A",
    ),
)


def mutated(chance: random.Random, url: str, start: int) -> str:
    """Put in, take out and repeat pieces of a URL, from a place on."""
    for _ in range(chance.randrange(1, 5)):
        at, end = sorted(chance.randrange(start, len(url) + 1) for _ in range(2))
        piece = chance.choice((chance.choice(PIECES), url[at:end], chr(chance.randrange(1, 0x3000))))
        url = url[:at] + piece + url[end if chance.random() < 0.4 else at :]
    return url


def test_every_random_url_is_read_or_refused_and_no_message_shows_its_password(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "entry_points", cache(opening.entry_points))  # reads every package's files
    chance, refused = random.Random(15), 0
    for number in range(INPUTS):
        url = URLS[number % len(URLS)]
        start = url.find("?") if chance.random() < 0.5 else 0
        url = mutated(chance, url, max(0, start))
        try:
            check_url(url)
        except StoreURLError as error:
            refused += 1
            assert len(str(error)) < 3 * len(repr(url)) + 500
            if start > 0 and f":{PASSWORD}@" in url:
                assert PASSWORD not in str(error), url
    assert INPUTS < 100 or INPUTS // 2 < refused < INPUTS, "mutations break every URL, or none"


def damage(chance: np.random.Generator, value: NDArray[np.uint8], mac_key: bytes | None) -> None:
    """Flip a bit, overwrite or zero a part, name another length, or another field with the right checksum."""
    at, end = np.sort(chance.integers(0, len(value) + 1, 2))
    match int(chance.integers(5)):
        case 0:
            value[at % len(value)] ^= 1 << int(chance.integers(8))
        case 1:
            value[at:end] = chance.integers(0, 256, end - at)
        case 2:
            value[at:end] = 0
        case 3:
            value[96:104] = chance.choice([0, 1, 127, 128, 255], 8)
        case 4:
            value[16 + at % 80] ^= 1 + int(chance.integers(255))
            value[:16] = 0
            value[:16] = checksum_rows(value[None], mac_key)[0]


@pytest.mark.parametrize("mac_key", [None, bytes(range(32))])
@pytest.mark.parametrize("varies", [False, True])
def test_only_an_undamaged_value_is_whole_and_no_length_in_it_takes_memory(varies: bool, mac_key: bytes | None):
    width, count = 96, 50
    chance, space = np.random.default_rng(16), bytes(range(32))
    keys = [bytes([number]) * 32 for number in range(count)]
    good = chance.integers(0, 256, (count, HEADER + width), dtype=np.uint8)
    lengths = chance.integers(0, width + 1, count).tolist() if varies else [width] * count
    for value, length in zip(good, lengths, strict=True):
        value[HEADER + length :] = 0
    seal_values(good, space, keys, lengths=lengths, mac_key=mac_key)
    tracemalloc.start()
    tried = 0
    while tried < INPUTS // 4:
        values = good.copy()
        for index in np.flatnonzero(chance.random(count) < 0.9):
            damage(chance, values[index], mac_key)
            tried += 1
        is_same = (values == good).all(axis=1)
        found = check_values(values.copy(), space, keys, varies=varies, mac_key=mac_key)
        assert [not reason for reason in found] == is_same.tolist()
        if not varies:
            heads, rows = values[:, :HEADER].copy(), np.ascontiguousarray(values[:, HEADER:])
            zeroed = heads.copy()
            zeroed[:, :16] = 0
            sums = checksum_rows(rows, mac_key, zeroed)
            assert check_parts(heads, sums, space, keys, width) == found, "in two pieces it is the same value"
    assert tracemalloc.get_traced_memory()[1] < 100 * good.nbytes
    tracemalloc.stop()
