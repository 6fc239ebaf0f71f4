"""An API server names a prompt's prefixes by the hashes that a replica's cache finds them by."""

from hypothesis import given
from hypothesis import strategies as st

from quire.core.memory.hash_chain import DIGEST_BYTES, HashChains
from quire.core.memory.prefix_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.sampled_from([1, 4, 16]), st.text(max_size=4), st.sampled_from(["", "a1b2"]))
def test_a_prompt_has_the_hashes_of_the_cache(
    token_ids: list[int], block_size: int, domain: str, adapter: str
) -> None:
    cache = PrefixCache(1, block_size, b"shared")
    expected: list[bytes] = []
    cache.extend_chain(expected, cache.root(domain, adapter.encode()), token_ids)
    found = HashChains(b"shared", block_size).of_prompt(token_ids, domain, adapter)
    assert found == expected
    assert all(len(digest) == DIGEST_BYTES for digest in found)


def test_secret_domain_and_adapter_separate_equal_prompts() -> None:
    prompt = list(range(8))
    chains = [
        HashChains(b"shared", 4).of_prompt(prompt),
        HashChains(b"other", 4).of_prompt(prompt),
        HashChains(b"shared", 4).of_prompt(prompt, "tenant"),
        HashChains(b"shared", 4).of_prompt(prompt, "", "a1b2"),
    ]
    assert len({digest for chain in chains for digest in chain}) == 8
