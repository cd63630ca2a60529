"""The prepare stage: namespaces, blocks, token estimates and what is learned from usage."""

from __future__ import annotations

import pytest

from calinix.config import CacheRegistry
from calinix.core.prepare import Preparer, Prompt, Ratio, Tokenizer
from calinix.core.requests import Work
from routing import BLOCK, ask, finish, make_config, make_router, pods, request


def prepare(prompt: bytes, tokenizer: Tokenizer = "bytes", **settings: object) -> Prompt:
    """Prepares one prompt."""
    return Preparer(tokenizer, None, True).prepare(request(prompt, **settings))


def test_default_blocks() -> None:
    """128 bytes, 32 words, 16 token ids; only full blocks count."""
    assert prepare(b"x" * 300).blocks == 2
    assert prepare(b"w " * 70, "words").blocks == 2
    assert prepare(b"abcd" * 40, prompt_is_tokens=True).blocks == 2
    assert Preparer("bytes", 50, True).prepare(request(b"x" * 300)).blocks == 6


def test_namespaces_do_not_share_blocks() -> None:
    """Model, tenant, kind of tokens, tokenizer and block size all make their own hashes."""
    data = b"x" * 256
    prompts = [
        prepare(data),
        prepare(data, model="m"),
        prepare(data, tenant=b"m"),
        prepare(data, model="m", tenant=b"m"),
        prepare(data, prompt_is_tokens=True),
        prepare(b"x " * 128, "words"),
        Preparer("bytes", 64, True).prepare(request(data)),
    ]
    assert len({prompt.namespace for prompt in prompts}) == len(prompts)
    assert len({prompt.chain[0] for prompt in prompts}) == len(prompts)
    assert all(len(prompt.namespace) == 16 for prompt in prompts)
    assert prepare(data).chain[0] == prepare(data).chain[0]


def test_namespace_parts_cannot_be_shifted() -> None:
    """What ends one part never begins the next one."""
    assert prepare(b"", model="ab", tenant=b"c").namespace != (
        prepare(b"", model="a", tenant=b"bc").namespace
    )


def test_size_in_engine_tokens() -> None:
    """Four bytes, three quarters of a word, one token id."""
    assert prepare(b"x" * 400).tokens == 100
    assert prepare(b"abcd" * 100, prompt_is_tokens=True).tokens == 100
    assert prepare(b"w " * 336, "words").tokens == pytest.approx(10.5 * 32 / 0.75)
    assert prepare(b"", "words").tokens == 0


@pytest.mark.parametrize(
    ("size", "blocks", "cap"),
    [(0, 0, 0), (127, 0, 0), (128, 1, 0), (129, 1, 1), (256, 2, 1), (257, 2, 2)],
)
def test_the_last_token_is_never_cached(size: int, blocks: int, cap: int) -> None:
    """A prompt of exactly k blocks can have k - 1 of them from the cache."""
    prompt = prepare(b"x" * size)
    assert (prompt.blocks, prompt.cap_blocks) == (blocks, cap)


@pytest.mark.parametrize(
    ("ids", "blocks", "cap"),
    [(0, 0, 0), (15, 0, 0), (16, 1, 0), (17, 1, 1), (32, 2, 1), (33, 2, 2)],
)
def test_nor_is_the_last_token_id(ids: int, blocks: int, cap: int) -> None:
    """The same for prompts of token ids."""
    prompt = prepare(b"abcd" * ids, prompt_is_tokens=True)
    assert (prompt.blocks, prompt.cap_blocks) == (blocks, cap)


def test_token_ids_have_a_block_size_of_their_own() -> None:
    """`cacheRegistry.tokenBlockSize` cuts token ids, text keeps its blocks; sizes stay true."""
    config = make_config(1, cache=CacheRegistry(token_block_size=40))
    router = make_router(config)
    ids = b"abcd" * 100
    finish(router, ask(router, ids, prompt_is_tokens=True))
    plan = ask(router, ids, prompt_is_tokens=True)
    assert (plan.prompt_blocks, plan.cached_blocks, plan.prompt_tokens) == (2, 2, 100)
    assert plan.predicted_cached_tokens == 80
    assert ask(router, b"x" * 300).prompt_blocks == 2


def test_predicted_cached_tokens_are_capped() -> None:
    """On a full hit the plan predicts all but the last block."""
    router = make_router(make_config(1))
    prompt = b"x" * (4 * BLOCK)
    finish(router, ask(router, prompt))
    plan = ask(router, prompt)
    assert (plan.prompt_blocks, plan.cached_blocks) == (4, 4)
    assert plan.predicted_cached_tokens == 3 * BLOCK / 4
    assert plan.prompt_tokens == 4 * BLOCK / 4


def test_units_per_token_are_learned_per_model() -> None:
    """Usage teaches how many bytes a model's token has; other models start as before."""
    preparer = Preparer("bytes", None, True)
    for _ in range(100):
        preparer.learn(preparer.prepare(request(b"x" * 3000, model="m")), 1000)
    assert preparer.prepare(request(b"x" * 3000, model="m")).tokens == pytest.approx(1000, rel=0.05)
    assert preparer.prepare(request(b"x" * 3000, model="n")).tokens == 750
    assert preparer.tokens_per_block == pytest.approx(128 / 3, rel=0.05)


def test_words_learn_from_long_prompts_only() -> None:
    """Short prompts' words are not known well enough."""
    preparer = Preparer("words", None, True)
    for _ in range(100):
        preparer.learn(preparer.prepare(request(b"w " * 40)), 400)
    assert preparer.prepare(request(b"w " * 336)).tokens == pytest.approx(448)
    for _ in range(200):
        preparer.learn(preparer.prepare(request(b"w " * 336)), 336)
    assert preparer.prepare(request(b"w " * 336)).tokens == pytest.approx(336, rel=0.05)


def test_nonsense_teaches_nothing() -> None:
    """No tokens, no prompt, a batch whose usage counts more than the prompt."""
    preparer = Preparer("bytes", None, True)
    preparer.learn(preparer.prepare(request(b"x" * 400)), 0)
    preparer.learn(preparer.prepare(request(b"x" * 400)), -5)
    preparer.learn(preparer.prepare(request(b"")), 100)
    preparer.learn(preparer.prepare(request(b"x" * 400, other_bytes=4000)), 5000)
    preparer.learn(preparer.prepare(request(b"abcd" * 100, prompt_is_tokens=True)), 100)
    assert preparer.prepare(request(b"x" * 400)).tokens == 100


def test_other_inputs_count_as_load_only() -> None:
    """A batch is as large as all of its inputs, and has the key of its first."""
    one, batch = prepare(b"x" * 400), prepare(b"x" * 400, other_bytes=4000)
    assert batch.tokens == 1100
    assert list(batch.chain) == list(one.chain)
    tokens = prepare(b"abcd" * 100, prompt_is_tokens=True, other_bytes=400)
    assert tokens.tokens == 200
    assert prepare(b"", work=Work.POOLING, other_bytes=4000).tokens == 1000
    assert prepare(b"x" * 4000, work=Work.NONE).tokens == 0


def test_nothing_is_hashed_when_the_registry_is_off() -> None:
    """cacheRegistry.enabled false: no blocks, no namespace, but sizes are still learned."""
    preparer = Preparer("bytes", None, False)
    prompt = preparer.prepare(request(b"x" * 4000))
    assert (prompt.blocks, prompt.namespace, prompt.tokens) == (0, "0" * 16, 1000)
    for _ in range(200):
        preparer.learn(preparer.prepare(request(b"x" * 4000)), 2000)
    assert preparer.prepare(request(b"x" * 4000)).tokens == pytest.approx(2000, rel=0.05)
    router = make_router(make_config(2, cache=CacheRegistry(enabled=False)))
    for _ in range(4):
        finish(router, ask(router, 10))
    assert ask(router, 10).cached_blocks == 0
    assert all(view.blocks == 0 for view in router.pods())


def test_tables_are_bounded() -> None:
    """Models and tenants come from clients: their tables do not grow without end."""
    preparer = Preparer("bytes", None, True)
    for number in range(6000):
        preparer.prepare(request(b"x", model=f"m{number}", tenant=b"%d" % number))
    assert len(preparer._namespaces) <= 4096
    assert len(preparer._ratios) <= 1024


def test_a_mirror_is_as_large_as_the_pods_kv_cache() -> None:
    """Capacity in blocks is KV tokens over tokens per block: own, stated by the engine, default."""
    from calinix.core.events import PodCapacity

    config = make_config(
        (*pods("own", 1, kv_capacity_tokens=3200), *pods("default", 2)),
        cache=CacheRegistry(kv_capacity_tokens=64_000),
    )
    router = make_router(config)
    router.observe(PodCapacity("default-1", 6400), 1.0)
    router.observe(PodCapacity("own-0", 6400), 1.0)
    found = {view.id: view.capacity_blocks for view in router.pods()}
    assert found == {"own-0": 100, "default-0": 2000, "default-1": 200}


def test_mirrors_follow_what_is_learned() -> None:
    """When a block turns out to be more tokens, fewer blocks fit."""
    router = make_router(make_config(pods("single", 1, kv_capacity_tokens=3200)))
    for number in range(300):
        finish(router, ask(router, b"%d" % (number % 10) * 1280), prompt_tokens=640)
        router.tick(1.0)
    assert router.pods()[0].capacity_blocks == pytest.approx(50, rel=0.2)


def test_a_ratio_weighs_by_size() -> None:
    """A short prompt with much template around it hardly moves the ratio."""
    ratio = Ratio(4.0)
    for _ in range(50):
        ratio.learn(40, 30)
        ratio.learn(40_000, 10_020)
    assert ratio.value == pytest.approx(4.0, rel=0.02)
