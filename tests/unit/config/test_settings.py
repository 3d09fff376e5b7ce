"""Settings that cannot work are refused before anything starts, and "auto" becomes one number."""

from math import inf

import pytest

from headstart.config.errors import ConfigError
from headstart.config.resolve import (
    DeviceFacts,
    ModelFacts,
    auto_chunk,
    resolve_pool,
    resolve_step,
    resolve_verify,
    threads_for,
)
from headstart.config.settings import (
    AccessSettings,
    CacheSettings,
    GatewaySettings,
    ModelSettings,
    StepSettings,
    TransferSettings,
    WorkerSettings,
    conflicts,
    refuse_conflicts,
)

GIB = 1 << 30
CPU = DeviceFacts("cpu", 8 * GIB)
GPU = DeviceFacts("cuda", 70 * GIB, total_bytes=80 * GIB)
SMALL = ModelFacts(max_context_len=8192, kv_bytes_per_token=46_080)


def test_defaults_have_no_conflicts() -> None:
    assert conflicts(WorkerSettings()) == []


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (WorkerSettings(model=ModelSettings(tp_size=2)), ["--tp-size", "--device"]),
        (
            WorkerSettings(model=ModelSettings(device="cpu"), cache=CacheSettings(kv_cache_dtype="fp8_e4m3")),
            ["--kv-cache-dtype fp8_e4m3", "--device cpu"],
        ),
        (
            WorkerSettings(model=ModelSettings(device="cuda"), cache=CacheSettings(kv_cache_dtype="float32")),
            ["--kv-cache-dtype float32", "--device cuda"],
        ),
        (
            WorkerSettings(model=ModelSettings(device="cuda", dtype="float16")),
            ["--dtype float16", "--device cuda"],
        ),
        (
            WorkerSettings(model=ModelSettings(device="cuda"), cache=CacheSettings(page_size=24)),
            ["--page-size 24", "--device cuda"],
        ),
        (
            WorkerSettings(model=ModelSettings(device="cpu"), step=StepSettings(cuda_graph_max_bs=8)),
            ["--cuda-graph-max-bs 8", "--device cpu"],
        ),
        (
            WorkerSettings(
                cache=CacheSettings(disable_radix_cache=True, disaggregation_decode_enable_radix_cache=True)
            ),
            ["--disable-radix-cache", "--disaggregation-decode-enable-radix-cache"],
        ),
        (
            WorkerSettings(cache=CacheSettings(max_total_tokens=1000, mem_fraction_static=0.5)),
            ["--max-total-tokens", "--mem-fraction-static"],
        ),
        (
            WorkerSettings(cache=CacheSettings(max_total_tokens=31, page_size=16)),
            ["--max-total-tokens", "--page-size"],
        ),
        (
            WorkerSettings(transfer=TransferSettings(disaggregation_ib_device="mlx5_0")),
            ["--disaggregation-ib-device", "--disaggregation-transfer-backend"],
        ),
        (
            WorkerSettings(transfer=TransferSettings(disaggregation_transfer_backend="mooncake")),
            ["--disaggregation-transfer-backend mooncake: only nixl is built"],
        ),
    ],
)
def test_a_combination_that_is_not_built_is_refused_naming_both_settings(
    settings: WorkerSettings, names: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_conflicts(settings)
    assert all(name in str(refusal.value) for name in names)


def test_all_conflicts_come_in_one_message() -> None:
    settings = WorkerSettings(
        model=ModelSettings(tp_size=4, device="cpu"),
        cache=CacheSettings(kv_cache_dtype="fp8_e4m3"),
        step=StepSettings(stream_interval=8),
    )
    with pytest.raises(ConfigError, match=r"(?s)--tp-size.*--kv-cache-dtype.*--stream-interval"):
        refuse_conflicts(settings)


@pytest.mark.parametrize(
    "build",
    [
        lambda: CacheSettings(page_size=0),
        lambda: CacheSettings(mem_fraction_static=1.5),
        lambda: CacheSettings(num_reserved_decode_tokens=-1),
        lambda: ModelSettings(context_length=1),
        lambda: ModelSettings(json_model_override_args="[1]"),
        lambda: ModelSettings(json_model_override_args="{"),
        lambda: StepSettings(chunked_prefill_size=0),
        lambda: StepSettings(local_prefill_tokens=-1),
        lambda: StepSettings(watchdog_timeout=0),
        lambda: StepSettings(watchdog_timeout=inf),
        lambda: StepSettings(drain_timeout=inf),
        lambda: GatewaySettings(request_timeout=inf),
        lambda: GatewaySettings(port=0),
        lambda: AccessSettings(api_key="alpha,,beta"),
        lambda: AccessSettings(api_key=" "),
        lambda: AccessSettings(api_key="alpha,sch\u00fcssel"),
        lambda: AccessSettings(api_key="al\tpha"),
        lambda: AccessSettings(admin_api_key=" operator"),
        lambda: AccessSettings(admin_api_key="\u043a\u043b\u044e\u0447"),
        lambda: AccessSettings(tenant_max_requests=-1),
        lambda: CacheSettings(tenant_cache_share=0),
        lambda: CacheSettings(tenant_cache_share=1.5),
        lambda: GatewaySettings(port=8000, control_port=8000),
    ],
)
def test_a_value_out_of_range_is_refused_where_it_is_declared(build) -> None:
    with pytest.raises(ConfigError, match="--"):
        build()


def test_several_keys_are_given_with_commas_and_none_is_empty() -> None:
    assert AccessSettings().api_keys == ()
    assert AccessSettings(api_key="alpha, beta").api_keys == ("alpha", "beta")


@pytest.mark.parametrize(("share", "num_pages"), [(1.0, None), (0.25, 250), (0.0001, 1)])
def test_a_tenants_share_of_the_cache_is_whole_pages_of_the_pool(share: float, num_pages: int | None) -> None:
    cache = CacheSettings(page_size=16, max_total_tokens=16_000, tenant_cache_share=share)
    assert resolve_pool(WorkerSettings(cache=cache), CPU, SMALL).owner_pages == num_pages


@pytest.mark.parametrize(
    ("setting", "device", "verifies"),
    [("auto", "cpu", True), ("auto", "cuda", False), ("on", "cuda", True), ("off", "cpu", False)],
)
def test_transfers_are_verified_where_it_costs_little_or_where_asked(setting: str, device: str, verifies: bool) -> None:
    assert resolve_verify(TransferSettings(verify_transfers=setting), device) is verifies


def test_page_size_follows_the_device() -> None:
    assert resolve_pool(WorkerSettings(), CPU, SMALL).page_size == 16
    assert resolve_pool(WorkerSettings(), GPU, SMALL).page_size == 64


def test_a_cpu_pool_takes_a_few_contexts_and_never_more_than_its_share_of_memory() -> None:
    assert resolve_pool(WorkerSettings(), CPU, SMALL).num_tokens == 32_768
    crowded = DeviceFacts("cpu", 1 * GIB, num_sharing=2)
    plan = resolve_pool(WorkerSettings(), crowded, SMALL)
    assert plan.num_tokens * SMALL.kv_bytes_per_token <= 0.2 * GIB
    assert plan.context_len <= plan.num_tokens


def test_a_cards_pool_is_its_workers_part_of_the_fraction_less_the_weights() -> None:
    card = DeviceFacts("cuda", 79 * GIB, num_sharing=2, total_bytes=80 * GIB, weight_bytes=10 * GIB)
    settings = WorkerSettings(cache=CacheSettings(mem_fraction_static=0.5))
    plan = resolve_pool(settings, card, SMALL)
    page_bytes = 64 * SMALL.kv_bytes_per_token
    assert 10 * GIB - page_bytes < plan.num_pages * page_bytes <= 10 * GIB


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (DeviceFacts("cuda", 79 * GIB, total_bytes=80 * GIB, weight_bytes=90 * GIB), "the weights take 92160 MiB"),
        (DeviceFacts("cuda", 10 * GIB, total_bytes=80 * GIB), "another process holds memory of this card"),
    ],
)
def test_a_card_without_room_is_refused_in_words(card: DeviceFacts, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_pool(WorkerSettings(), card, SMALL)


def test_max_total_tokens_is_rounded_down_to_whole_pages() -> None:
    settings = WorkerSettings(cache=CacheSettings(max_total_tokens=1000, page_size=64))
    plan = resolve_pool(settings, CPU, SMALL)
    assert (plan.num_pages, plan.context_len) == (15, 960)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--context-length"):
        resolve_pool(WorkerSettings(model=ModelSettings(context_length=10_000)), CPU, SMALL)


def test_a_pool_without_two_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="two pages"):
        resolve_pool(WorkerSettings(), DeviceFacts("cpu", 1000), SMALL)


@pytest.mark.parametrize("speed", [1.0, 90.0, 400.0, 1300.0, 1e6])
def test_an_automatic_chunk_takes_less_than_half_a_second_where_it_is_not_the_smallest(speed: float) -> None:
    chunk = auto_chunk(speed, 16, "cpu")
    assert chunk % 16 == 0
    assert chunk == 32 or chunk / speed < 0.5


def test_local_prefill_is_one_page_on_a_cpu_and_256_tokens_on_a_gpu() -> None:
    cpu, gpu = (resolve_pool(WorkerSettings(), facts, SMALL) for facts in (CPU, GPU))
    assert resolve_step(StepSettings(), 64, cpu, "cpu", 400).local_prefill_tokens == 16
    assert resolve_step(StepSettings(), 64, gpu, "cuda", 1e5).local_prefill_tokens == 256
    assert resolve_step(StepSettings(local_prefill_tokens=0), 64, cpu, "cpu", 400).local_prefill_tokens == 0


def test_workers_share_the_cores_and_each_gets_at_least_one() -> None:
    assert [threads_for(8, 2), threads_for(2, 2), threads_for(1, 4), threads_for(4, 0)] == [4, 1, 1, 4]
