"""How long is a decode step of a whole model: few rows that share nothing, and three times as many that share prefixes?

The model library's Qwen3-1.7B with random weights and our attention in it, fp8 KV, one captured graph a step: it writes
the new tokens' KV into the pool, attends, and takes the likeliest token. What the host does around a step is not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from common import (
    NO_SHARING,
    Card,
    Scene,
    Spread,
    Workload,
    arguments,
    in_graph,
    print_table,
    save,
    tiling_for,
    time_calls,
)
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart.attention.device_plan import DevicePlan
from headstart.attention.triton_attention import Partials, PlannedAttention, UngroupedDecode, decode_tile, fitting_rows
from headstart.model.attention_hook import ATTENTION_NAME, STEP_KEYWORD, register_attention

PLAIN_CHUNK = 2048
ROOM_FOR_ALL = 130e9  # bytes of a card that holds 37 rows of 54,675 tokens; a smaller one gets shorter rows


def build_model(work: Workload, smoke: bool) -> PreTrainedModel:
    register_attention()
    config = AutoConfig.for_model(
        "qwen3", hidden_size=64 if smoke else 2048, intermediate_size=128 if smoke else 6144,
        num_hidden_layers=work.layers, num_attention_heads=work.heads.num_q_heads, num_key_value_heads=work.kv_heads,
        head_dim=work.head_dim, vocab_size=512 if smoke else 151_936, tie_word_embeddings=True,
        max_position_embeddings=65_536,
    )  # fmt: skip
    dtype = torch.float16 if smoke else torch.bfloat16
    with torch.device("cpu" if smoke else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class DecodeStep:
    """One step's attention: new KV goes to each row's last place, then `attention` runs over the pool."""

    scene: Scene
    pages: torch.Tensor  # [rows] page of the new token
    slots: torch.Tensor  # [rows] its place there
    attention: Callable[[torch.Tensor, int], torch.Tensor]

    @classmethod
    def of(cls, scene: Scene, attention: Callable[[torch.Tensor, int], torch.Tensor]) -> "DecodeStep":
        last = scene.kv_lens - 1
        page = scene.work.page
        pages = np.array([table[at // page] for table, at in zip(scene.tables, last, strict=True)], np.int64)
        slots = torch.from_numpy(last % page).to(scene.device)
        return cls(scene, torch.from_numpy(pages).to(scene.device), slots, attention)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        for part, new in enumerate((key, value)):
            stored = new.float() / self.scene.scales[part][:, None]
            places = self.scene.pool[:, :, layer, part].view(torch.uint8)
            places[self.pages, :, self.slots] = stored.to(self.scene.pool.dtype).view(torch.uint8)
        return self.attention(query.contiguous(), layer)


def plain_attention(scene: Scene) -> Callable[[torch.Tensor, int], torch.Tensor]:
    heads, splits = scene.work.heads, -(-int(scene.kv_lens.max()) // PLAIN_CHUNK)
    partials = Partials.empty(heads, splits * scene.work.rows, scene.device)
    plain = UngroupedDecode(heads, decode_tile(heads, scene.work.fp8), partials, splits, PLAIN_CHUNK)
    return lambda q, layer: plain(q, scene.kv(layer), scene.rows, torch.empty_like(q))


def planned_attention(scene: Scene, card: Card, shared: bool) -> Callable[[torch.Tensor, int], torch.Tensor]:
    work, heads = scene.work, scene.work.heads
    tile = decode_tile(heads, work.fp8, fitting_rows(heads, work.fp8, work.rows / work.groups if shared else 1))
    plan = scene.plan(tiling_for(card, work, tile, **({} if shared else {"min_share": NO_SHARING})))
    device_plan = DevicePlan(work.rows, len(plan.items), scene.device)
    device_plan.upload(plan)
    partials = Partials.empty(heads, plan.num_slots, scene.device)
    planned = PlannedAttention(heads, tile, partials, card.num_sms, causal=False)
    return lambda q, layer: planned(q, scene.kv(layer), scene.rows, device_plan, torch.empty_like(q))


def step_of(model: PreTrainedModel, step: DecodeStep) -> Callable[[], object]:
    scene = step.scene
    tokens = torch.randint(model.config.vocab_size, (1, scene.work.rows), device=scene.device)
    positions = torch.from_numpy(scene.kv_lens - 1).to(scene.device)[None]

    def run() -> torch.Tensor:
        with torch.inference_mode():
            logits = model(tokens, position_ids=positions, use_cache=False, **{STEP_KEYWORD: step}).logits
            return logits.argmax(-1)

    return in_graph(run)


def main() -> None:
    args = arguments(__doc__)
    card = Card.measure(args.smoke)
    large = not args.smoke and torch.cuda.get_device_properties(0).total_memory > ROOM_FOR_ALL
    prefix, private = (50_000, 4_675) if large else (26_000, 2_340)
    alone = Workload(37, 37, 0, prefix + private, fp8=True, layers=28)
    together = Workload(115, 20, prefix, private, fp8=True, layers=28)
    if args.smoke:
        alone, together = alone.small(), together.small()
    model = build_model(alone, args.smoke)
    results = []
    for work in (alone, together):
        scene = Scene.lay_out(work, card.device)
        arms = {"every row reads its own": plain_attention(scene)}
        if work.groups < work.rows:
            arms["planned, sharing nothing"] = planned_attention(scene, card, shared=False)
            arms["planned, each prefix once"] = planned_attention(scene, card, shared=True)
        calls = [step_of(model, DecodeStep.of(scene, attention)) for attention in arms.values()]
        for name, times in zip(arms, time_calls(calls, repeats=20), strict=True):
            spread = Spread.of(times)
            results.append({
                "rows": work.rows, "prefixes": work.groups, "row": int(scene.kv_lens.mean()), "arm": name, "step ms": spread.median_s * 1e3,
                "p10": spread.p10_s * 1e3, "p90": spread.p90_s * 1e3, "tokens/s": work.rows / spread.median_s,
                "unique KV GB": scene.unique_tokens * work.token_bytes * work.layers / 1e9,
            })  # fmt: skip
        del scene, arms, calls
        if card.device == "cuda":
            torch.cuda.empty_cache()
    print_table(results)
    save(args, "itl", card, results)


if __name__ == "__main__":
    main()
