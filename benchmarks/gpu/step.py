"""How long is a decode step of a whole model, and what is it spent on: the library's forward, with liger-kernel, fused?

The model library's Qwen3-1.7B and 8B with random weights, fp8 KV, planned attention, one captured graph a step that
ends with the likeliest token. Parts are sums of kernel times from the profiler; what the host does is not in it.
"""

import gc
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from common import Card, Scene, Spread, Workload, arguments, in_graph, print_table, save, tiling_for, time_calls
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.attention.device_plan import DevicePlan
from headstart.attention.packed import PackedHeads
from headstart.attention.triton_attention import Partials, PlannedAttention, decode_tile
from headstart.attention.triton_write import norm_rope_write
from headstart.model.gpu_fusion import fuse_for_gpu
from headstart.model.hook import ATTENTION_NAME, STEP_KEYWORD, register_attention

MODELS = {
    "1.7B": (28, 16, {"hidden_size": 2048, "intermediate_size": 6144, "tie_word_embeddings": True}),
    "8B": (36, 32, {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}),
}
CASES = ((1, 1_024), (16, 1_024), (128, 1_024), (1, 50_000))
PARTS = (
    ("attention", ("grouped_kernel", "merge_kernel", "norm_rope_write")),
    ("GEMM", ("gemm", "gemv", "nvjet", "cutlass", "splitk", "small_linear", "cublas", "dot_kernel")),
)


def build_model(name: str, smoke: bool) -> PreTrainedModel:
    register_attention()
    layers, heads, sizes = MODELS[name]
    if smoke:
        layers, sizes = 2, {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True}
    config = AutoConfig.for_model(
        "qwen3", num_hidden_layers=layers, num_attention_heads=4 if smoke else heads,
        num_key_value_heads=2 if smoke else 8, head_dim=64 if smoke else 128, vocab_size=512 if smoke else 151_936,
        max_position_embeddings=65_536, **sizes,
    )  # fmt: skip
    with torch.device("cpu" if smoke else "cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float16 if smoke else torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Step:
    """One step's attention over a scene, from separate or packed heads."""

    scene: Scene
    planned: PlannedAttention
    plan: DevicePlan
    slots: torch.Tensor  # int32 [rows]

    @classmethod
    def of(cls, scene: Scene, card: Card) -> "Step":
        work = scene.work
        tile = decode_tile(work.heads, work.fp8)
        plan = scene.plan(tiling_for(card, work, tile))
        device_plan = DevicePlan(work.rows, len(plan.items), scene.device)
        device_plan.upload(plan)
        partials = Partials.empty(work.heads, plan.num_slots, scene.device)
        planned = PlannedAttention(work.heads, tile, partials, card.num_sms, causal=False)
        last = scene.kv_lens - 1
        pages = np.array([table[at // work.page] for table, at in zip(scene.tables, last, strict=True)], np.int64)
        slots = torch.from_numpy((pages * work.page + last % work.page).astype(np.int32)).to(scene.device)
        return cls(scene, planned, device_plan, slots)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        page = self.scene.work.page
        for part, new in enumerate((key, value)):
            stored = new.float() / self.scene.scales[part][:, None]
            places = self.scene.pool[:, :, layer, part].view(torch.uint8)
            places[self.slots // page, :, self.slots % page] = stored.to(self.scene.pool.dtype).view(torch.uint8)
        return self._attended(query.contiguous(), layer)

    def attend_packed(self, layer: int, heads: PackedHeads, scale: float) -> torch.Tensor:
        return self._attended(norm_rope_write(heads, self.scene.work.heads, self.scene.kv(layer), self.slots), layer)

    def _attended(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self.planned(q, self.scene.kv(layer), self.scene.rows, self.plan, out)


def step_of(model: PreTrainedModel, step: Step) -> Callable[[], object]:
    scene = step.scene
    tokens = torch.randint(model.config.vocab_size, (1, scene.work.rows), device=scene.device)
    positions = torch.from_numpy(scene.kv_lens - 1).to(scene.device)[None]

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return model(tokens, position_ids=positions, use_cache=False, **{STEP_KEYWORD: step}).logits.argmax(-1)

    return in_graph(run)


def parts_of(call: Callable[[], object], repeats: int = 3) -> dict[str, float]:
    """Milliseconds of a call by kind of kernel; "other" is element-wise. Also the number of kernels."""
    if not torch.cuda.is_available():
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    ms: Counter[str] = Counter()
    kernels = 0
    names: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        if "memcpy" in name or "memset" in name:
            continue
        kernels += 1
        part = next((part for part, words in PARTS if any(word in name for word in words)), "other")
        ms[part] += event.device_time / 1e3 / repeats
        names[event.name[:60]] += event.device_time / repeats
    top = {name: round(us, 1) for name, us in names.most_common(10)}
    return {**ms, "kernels": kernels // repeats, "top": top}  # type: ignore[dict-item]


def prepare(model: PreTrainedModel, arm: str) -> None:
    if arm == "fused":
        assert fuse_for_gpu(model) == model.config.num_hidden_layers
    elif arm == "liger":  # changes the library's modules for the process, so it is the last arm
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=model, fused_linear_cross_entropy=False)


def measure(name: str, arm: str, cases: tuple[tuple[int, int], ...], card: Card, smoke: bool) -> list[dict]:
    layers, heads, _ = MODELS[name]
    model = build_model(name, smoke)
    prepare(model, arm)
    results = []
    for rows, length in cases:
        work = Workload(rows, rows, 0, length, group=heads // 8, fp8=True, layers=layers)
        if smoke:
            work = Workload(rows, rows, 0, 70, kv_heads=2, head_dim=64, page=16, layers=2, fp8=True)
        scene = Scene.lay_out(work, card.device)
        call = step_of(model, Step.of(scene, card))
        spread = Spread.of(time_calls([call], repeats=20, warmups=3)[0])
        results.append({"model": name, "arm": arm, "rows": rows, "length": length, "ms": spread.median_s * 1e3,
                        "p10": spread.p10_s * 1e3, "p90": spread.p90_s * 1e3, **parts_of(call)})  # fmt: skip
        del scene, call
    return results


def head_ms(name: str, rows: int) -> float:
    """The head alone, in a graph: logits of the model's type, none in float32."""
    width = MODELS[name][2]["hidden_size"]
    weights = [torch.randn(151_936, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    call = in_graph(lambda: [torch.nn.functional.linear(x, weight) for weight in weights])
    return Spread.of(time_calls([call], repeats=10)[0]).median_s / 2 * 1e3


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    results: list[dict] = []
    for arm in ("fused",) if args.smoke else ("fused", "plain", "liger"):
        for name in ("1.7B",) if args.smoke else MODELS:
            try:
                found = measure(name, arm, ((2, 70),) if args.smoke else CASES, card, args.smoke)
            except ImportError as error:
                print(f"# {arm}: {error}")
                continue
            for row in found:
                if not args.smoke:
                    row["head"] = head_ms(name, row["rows"])
                print(json.dumps(row.get("top", {})))
            results += found
            gc.collect()
            if card.device == "cuda":
                torch.cuda.empty_cache()
    print_table([{key: value for key, value in row.items() if key != "top"} for row in results])
    save(args, "step", card, results)


if __name__ == "__main__":
    main()
