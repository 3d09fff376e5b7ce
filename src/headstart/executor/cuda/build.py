"""From a loaded model and a layout to a running executor on a card."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headstart.attention.triton_attention import HeadShape, LayerKV
from headstart.core.kv_layout import KVLayout
from headstart.core.layout import pages_for
from headstart.executor.build import DTYPES, CardLimits, ExecutorConfig, choose_dtype, kv_layout, model_info
from headstart.executor.cuda.attention import CardAttention, PromptAttention
from headstart.executor.cuda.errors import worker_error
from headstart.executor.cuda.executor import CudaExecutor
from headstart.executor.cuda.graphs import graph_sizes
from headstart.executor.cuda.load import load_on_card
from headstart.executor.cuda.scales import read_scales
from headstart.executor.cuda.steps import RowBounds, StepLauncher
from headstart.executor.pool import KVPool
from headstart.model.gpu_fusion import fuse_for_gpu
from headstart.model.info import ModelInfo
from headstart.model.self_test import ScratchPool, SelfTest, check_model, library_logits, num_test_pages

SPARE_PAGES = 64
"""Pages that a lease may hold beyond its context: growth set aside."""

log = logging.getLogger("headstart.executor")


def card_attention(pool: KVPool, folder: Path, info: ModelInfo) -> CardAttention:
    """Attention over `pool`, with scales of fp8 KV out of the checkpoint in `folder`. Raises WorkerError."""
    device = pool.data.device
    heads = HeadShape(info.num_heads, info.num_kv_heads, info.head_dim, info.head_dim**-0.5)
    layers = range(info.num_layers)
    if pool.layout.dtype == "fp8_e4m3":
        scales, found = read_scales(folder, info.num_layers, info.num_kv_heads, str(device))
        log.info("scales of fp8 KV: %s", "the checkpoint's" if found else "1, the checkpoint has none")
        views = tuple(LayerKV.of_pool(pool.data, layer, scales[layer]) for layer in layers)
    else:
        views = tuple(LayerKV.of_pool(pool.data, layer) for layer in layers)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return CardAttention(heads, views, num_sms, device)


def make_card_executor(config: ExecutorConfig, on_done: Callable[[], None] | None = None) -> CudaExecutor:
    """Load the model onto the card, reserve the pool, start the watching thread. Raises WorkerError."""
    info = model_info(config)
    dtype = DTYPES[choose_dtype(config.dtype, config.device)]
    try:
        torch.cuda.init()
        model = load_on_card(config.weights, dtype, config.device)
        expected = library_logits(model) if config.self_test else None
        layout = kv_layout(config, info)
        if expected is not None:
            _self_test(config, model, expected, layout, info)
        log.info("fused layers: %d of %d", fuse_for_gpu(model), info.num_layers)
        pool = KVPool.allocate(layout, config.num_pages, config.device)
        return executor_over(model, pool, card_attention(pool, config.weights.folder, info), config.card, on_done)
    except torch.cuda.OutOfMemoryError as error:
        raise worker_error(error, "starting") from error
    except RuntimeError as error:  # no driver, one that is too old, a card that is taken
        raise worker_error(error, "starting") from error


def executor_over(
    model: PreTrainedModel,
    pool: KVPool,
    card: CardAttention,
    limits: CardLimits,
    on_done: Callable[[], None] | None = None,
) -> CudaExecutor:
    """Allocate the buffers of steps and start the watching thread."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    bounds = RowBounds(
        max_rows=max(limits.max_rows, limits.graph_max_rows),
        max_pages=_max_pages(pool.layout, pool.num_pages, limits.context_len),
        graph_sizes=graph_sizes(limits.graph_max_rows),
    )
    executor = CudaExecutor(pool, StepLauncher(model, vocab_size, card, bounds), on_done)
    executor.start()
    return executor


def _self_test(
    config: ExecutorConfig, model: PreTrainedModel, expected: SelfTest, layout: KVLayout, info: ModelInfo
) -> None:
    """Raise ModelRefused unless steps over a small pool of `layout` give what the library computes. Before layers are
    fused: each fused layer is compared with the library's on its own."""
    pool = KVPool.allocate(layout, num_test_pages(config.page_size), config.device)
    attention = PromptAttention(card_attention(pool, config.weights.folder, info))
    check_model(
        model, expected, ScratchPool(attention.begin, config.page_size, info.num_layers), model.dtype, info.context_len
    )


def _max_pages(layout: KVLayout, num_pages: int, context_len: int) -> int:
    """Of one row's page table, a multiple of 16 so that rows begin aligned."""
    wanted = pages_for(context_len, layout.page_size) + SPARE_PAGES if context_len else num_pages
    return -(-min(wanted, num_pages) // 16) * 16
