"""Failure cases K: nothing that would change KV is left out of a page's identity.

Not here, with the reason: K6 (weights are never swapped in a running worker; a restart has a new pool).
"""

import subprocess
import sys

import pytest

from headstart.core.arrays import int32_array
from headstart.core.identity import cache_namespace
from headstart.kv.cache import PrefixCache
from tests.support.clusters import make_cluster, prompt, serve, settle, stats


@pytest.mark.behaviour("K1")
def test_a_namespace_is_the_same_in_every_process() -> None:
    code = "from headstart.core.identity import cache_namespace as n; print(n('a', b'b').hex(), n().hex())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "1")
    }
    assert digests == {f"{cache_namespace('a', b'b').hex()} {cache_namespace().hex()}"}


@pytest.mark.behaviour("K2", "K3")
def test_parts_of_a_namespace_are_typed_and_cannot_run_into_each_other() -> None:
    names = [cache_namespace(), cache_namespace("ab"), cache_namespace("a", b"b"), cache_namespace("", b"ab")]
    names += [cache_namespace("None"), cache_namespace("a"), cache_namespace("", b"a")]
    assert len(set(names)) == len(names)


@pytest.mark.behaviour("K8")
def test_a_salt_survives_every_hop() -> None:
    """Gateway, decode, prefill and both pools: the executor's KV of a namespace is unlike that of any other."""
    cluster = make_cluster(decode_pages=200, prefill_pages=200)
    salts = [cache_namespace(tenant_salt=bytes([i])) for i in range(3)]
    for salt in salts:
        cold = serve(cluster, prompt(21), namespace=salt)
        assert (stats(cold).decode_prefix_len, stats(cold).prefill_prefix_len) == (0, 0)
    for salt in salts:
        warm = serve(cluster, prompt(41), namespace=salt)
        assert (stats(warm).decode_prefix_len, stats(warm).prefill_prefix_len) == (20, 20)
    settle(cluster)


@pytest.mark.behaviour("K9")
def test_a_hit_compares_tokens_and_no_digest_of_them() -> None:
    cache = PrefixCache(64, 4)
    tokens = int32_array(range(16))
    lease = cache.try_lease(cache.match(b"", tokens), 4)
    assert lease is not None
    cache.commit(lease, tokens, 16)
    for position in range(16):
        other = tokens.copy()
        other[position] += 1
        assert cache.match(b"", other).prefix_len == position // 4 * 4
