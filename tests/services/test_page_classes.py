"""Blocks of several page classes on real servers: Redis or Valkey, and S3."""

from collections.abc import Iterator

import pytest
from paged_cache import MODELS, PROMPT, new_cache, serve
from servers import serving_store


@pytest.fixture(scope="module", params=["valkey", "s3"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_store(request.param, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.mark.parametrize("model", MODELS)
def test_another_process_continues_a_prompt_with_the_bytes_of_all_groups(model: str, url: str) -> None:
    with new_cache(url, model) as cache:
        cached, _, computed = serve(cache, PROMPT)
        assert cached == 0
    with new_cache(url, model) as cache:
        cached, began, _ = serve(cache, PROMPT)
        assert cached == 56
        assert {group for group, _ in began} == set(range(len(MODELS[model])))
        assert all(row == computed[place] for place, row in began.items())
        assert cache.prefix_store.stats().hit_blocks == len(began)
        assert cache.prefix_store.forget()
        assert serve(cache, [1, *PROMPT])[0] == 0
    with new_cache(url, model) as cache:
        assert serve(cache, PROMPT)[0] == 0, "a process finds what another one forgot"
