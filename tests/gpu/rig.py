"""An executor for cards over a small random model, on a card or, kernel by kernel, in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from headstart.attention.triton_attention import HeadShape, LayerKV
from headstart.core.arrays import int32_array
from headstart.core.batch import Batch, BatchOutput, PendingToken, Row, Sampled, SampleSpec
from headstart.core.kv_layout import KVLayout
from headstart.core.layout import pages_for
from headstart.core.request import SamplingParams
from headstart.executor.cuda.attention import CardAttention
from headstart.executor.cuda.executor import CudaExecutor
from headstart.executor.cuda.graphs import graph_sizes
from headstart.executor.cuda.steps import RowBounds, StepLauncher
from headstart.executor.pool import KVPool
from headstart.model.gpu_fusion import fuse_for_gpu
from headstart.model.info import read_model_info
from headstart.model.load import load_model
from headstart.model.source import WeightSource
from tests.unit.executor.world import write_small_model

VOCAB = 311
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Setup:
    """What an executor under test is made of."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: str = "bfloat16"
    page_size: int = 64
    num_pages: int = 400
    max_rows: int = 32
    graph_rows: int = 32
    head_dim: int = 64
    fused: bool = True


@dataclass(eq=False)
class Request_:
    """A request as a scheduler would drive it: its tokens, and its pages."""

    tokens: list[int]
    prompt_len: int
    params: SamplingParams = GREEDY
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    table: np.ndarray = field(default_factory=lambda: int32_array([]))
    waits_for: tuple[int, int] | None = None  # (step, row) that draws its next token
    num_drawn: int = 0  # outputs, those in flight included

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Rig:
    """Drives the executor with batches built by hand."""

    def __init__(self, folder: Path, setup: Setup) -> None:
        self.setup = setup
        config = {"head_dim": setup.head_dim, "num_hidden_layers": 2, "initializer_range": 0.12}
        write_small_model(folder, "qwen3", **config)
        self.source = WeightSource(folder, "dummy", seed=3)
        info, device = read_model_info(folder), torch.device(setup.device)
        model = load_model(self.source, setup.dtype, setup.device)
        if setup.fused:
            assert fuse_for_gpu(model) == info.num_layers
        layout = KVLayout.full(setup.page_size, info.num_layers, info.num_kv_heads, info.head_dim, setup.kv_dtype)
        self.pool = KVPool.allocate(layout, setup.num_pages, setup.device)
        poison(self.pool)
        scales = [torch.full((info.num_kv_heads,), scale, device=device) for scale in (0.05, 0.02)]
        layers = tuple(
            LayerKV.of_pool(self.pool.data, layer, tuple(scales) if setup.kv_dtype == "fp8_e4m3" else None)  # type: ignore[arg-type]
            for layer in range(info.num_layers)
        )
        on_card = device.type == "cuda"
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_card else 2
        heads = HeadShape(info.num_heads, info.num_kv_heads, info.head_dim, info.head_dim**-0.5)
        card = CardAttention(heads, layers, num_sms, device)
        bounds = RowBounds(setup.max_rows, 3072 // setup.page_size, graph_sizes(setup.graph_rows))
        self.executor = CudaExecutor(self.pool, StepLauncher(model, VOCAB, card, bounds))
        self.executor.start()
        self.free = np.random.default_rng(7).permutation(setup.num_pages).tolist()
        self.step_id = 0

    def admit(self, prompt: Sequence[int], params: SamplingParams = GREEDY, like: Request_ | None = None) -> Request_:
        """A request; it starts with the whole pages of `like` that hold the same tokens."""
        request = Request_(list(prompt), len(prompt), params)
        if like is not None:
            known = min(like.num_computed, len(prompt) - 1)
            same = next((i for i in range(known) if prompt[i] != like.tokens[i]), known)
            request.pages = like.pages[: same // self.setup.page_size]
            request.num_computed = len(request.pages) * self.setup.page_size
        return request

    def release(self, request: Request_) -> None:
        """Give its own pages back, for others to be written into."""
        self.free += request.pages
        request.pages, request.num_computed, request.table = [], 0, int32_array([])

    def row(self, request: Request_, row_id: int, chunk: int) -> Row:
        start, known = request.num_computed, len(request.tokens)
        missing = known - start
        num_new = min(missing, chunk) if missing > 1 else 1
        num_pages = pages_for(start + num_new, self.setup.page_size)
        if num_pages > len(request.pages) or len(request.table) != len(request.pages):
            while len(request.pages) < num_pages:
                request.pages.append(self.free.pop())
            request.table = int32_array(request.pages)
        samples = start + num_new >= known
        spec = None
        if samples:
            spec = SampleSpec(request.params, 0, request.num_drawn, int32_array(request.tokens), request.prompt_len)
            request.num_drawn += 1
        pending = PendingToken(*request.waits_for) if request.waits_for is not None else None
        tokens = request.tokens[start : start + num_new] if pending is None else []
        request.num_computed += num_new
        return Row(row_id, int32_array(tokens), start, request.table, spec, pending=pending)

    def launch(self, rows: Sequence[Row]) -> int:
        self.step_id += 1
        self.executor.launch(Batch(self.step_id, tuple(rows)))
        return self.step_id

    def finish(self) -> BatchOutput:
        while (output := self.executor.poll()) is None:
            pass
        return output

    def run(self, rows: Sequence[Row]) -> BatchOutput:
        self.launch(rows)
        return self.finish()

    def generate(self, requests: Sequence[Request_], num_tokens: int, chunk: int = 512, stagger: int = 0) -> None:
        """One step in flight; request i joins at step i * stagger."""
        step = 0
        while any(len(one.outputs) < num_tokens for one in requests):
            active = [
                (i, one) for i, one in enumerate(requests) if i * stagger <= step and len(one.outputs) < num_tokens
            ]
            output = self.run([self.row(one, i, chunk) for i, one in active])
            apply(dict(active), output.sampled)
            step += 1

    def generate_ahead(self, requests: Sequence[Request_], num_tokens: int, chunk: int = 512, stagger: int = 0) -> None:
        """Two steps in flight: a row's input may be the token that the step before has yet to draw."""
        inflight: list[dict[int, Request_]] = []
        step = 0
        while inflight or any(one.num_drawn < num_tokens for one in requests):
            active = {i: one for i, one in enumerate(requests) if i * stagger <= step and one.num_drawn < num_tokens}
            rows = [self.row(one, i, chunk) for i, one in active.items()]
            step += 1
            if rows:
                self.launch(rows)
                for row in rows:
                    active[row.row_id].waits_for = (self.step_id, row.row_id) if row.sample is not None else None
                inflight.append(active)
            if len(inflight) == 2 or (inflight and not rows):
                for one in self.finish().sampled:
                    request = inflight[0][one.row_id]
                    apply({one.row_id: request}, [one])
                    if request.waits_for is not None and request.num_drawn == len(request.outputs):
                        request.waits_for = None
                inflight.pop(0)


def apply(active: dict[int, Request_], sampled: Sequence[Sampled]) -> None:
    for one in sampled:
        assert one.error is None, one.error
        active[one.row_id].tokens.append(one.token_ids[0])


def poison(pool: KVPool) -> None:
    """Reading a position that no row has written shows."""
    if pool.data.dtype == torch.float8_e4m3fn:
        pool.data.view(torch.uint8).fill_(0x7F)
    else:
        pool.data.fill_(torch.nan)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def assert_greedy(rig: Rig, request: Request_, noise: float) -> None:
    """Every output is the library's argmax after the same tokens, unless its margin is below the noise of the type."""
    reference: PreTrainedModel = _reference(rig)
    with torch.inference_mode():
        logits = reference(torch.tensor([request.tokens]), use_cache=False).logits[0, request.prompt_len - 1 : -1]
    for i, token in enumerate(request.outputs):
        margin = float(logits[i].max() - logits[i, token])
        assert margin < noise, f"output {i} is {token}, {margin} below {int(logits[i].argmax())}"


def _reference(rig: Rig) -> PreTrainedModel:
    """The library's own model in float32, its weights rounded as the executor's are."""
    if not hasattr(rig, "reference"):
        model = load_model(rig.source, rig.setup.dtype).float()
        model.set_attn_implementation("sdpa")
        rig.reference = model
    return rig.reference  # type: ignore[no-any-return]
