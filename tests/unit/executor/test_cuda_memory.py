"""What a card's memory is divided by, known from the configuration alone."""

from pathlib import Path

import torch

from headstart.core.errors import WorkerError
from headstart.executor.cuda.errors import worker_error
from headstart.executor.cuda.graphs import fitting, graph_sizes, mixed_sizes
from headstart.model.load import load_model, num_parameters
from headstart.model.source import WeightSource
from tests.unit.executor.world import write_small_model


def test_weights_are_counted_without_loading_them(tmp_path: Path) -> None:
    source = WeightSource(write_small_model(tmp_path, "qwen3", tie_word_embeddings=True), "dummy")
    model = load_model(source, torch.float32)
    assert num_parameters(source) == sum(one.numel() for one in model.parameters())


def test_graph_sizes_go_up_to_what_is_asked_for() -> None:
    assert graph_sizes(0) == mixed_sizes(0) == ()
    assert graph_sizes(1) == mixed_sizes(1) == (1,)
    assert graph_sizes(100)[-3:] == (64, 96, 100)
    assert mixed_sizes(20) == (20,)
    assert mixed_sizes(256) == (32, 256)
    assert [fitting(graph_sizes(100), rows) for rows in (1, 3, 97, 101)] == [1, 4, 100, None]


def test_errors_of_the_card_are_one_line_that_says_what_can_be_done() -> None:
    error = worker_error(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate ..."), "step 3")
    assert isinstance(error, WorkerError)
    assert str(error).startswith("out of GPU memory in step 3; lower --mem-fraction-static")
    other = worker_error(RuntimeError("CUDA error: an illegal memory access\nCompile with ..."), "step 7")
    assert str(other) == "the GPU failed in step 7: RuntimeError: CUDA error: an illegal memory access"
