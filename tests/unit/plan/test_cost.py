"""The step formula, and cost models as files."""

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config.errors import ConfigError
from headstart.plan.cost import (
    CostModel,
    DecodeCost,
    Experts,
    FrontCoefficients,
    StepCoefficients,
    load_model,
    save_model,
)
from headstart.sim.cost import LinkCost, StepShape, times_of

STEP = StepCoefficients(fixed_s=1.0, weights_s=20.0, kv_token_s=0.5, row_s=3.0, request_s=0.25, pair_s=0.125)
MODEL = CostModel("by hand", "cpu", 8, STEP, STEP, LinkCost(0.5, 0.25), FrontCoefficients(0.1, 0.2, 0.3))
FOUR_ROWS = StepShape(num_rows=4, num_new=4, context_tokens=100, unique_tokens=40, pair_tokens=80)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert MODEL.decode_time(FOUR_ROWS) == 1 + 20 + 0.5 * 40 + 3 * 4 + 0.25 * 4 + 0.125 * 80


def test_reading_and_computing_hide_each_other_where_the_device_lets_them() -> None:
    model = replace(MODEL, decode=replace(STEP, overlaps=True))
    assert model.decode_time(FOUR_ROWS) == 1 + max(20, 3 * 4) + max(0.5 * 40, 0.125 * 80) + 0.25 * 4


def test_rows_are_padded_to_tiles() -> None:
    model = replace(MODEL, decode=replace(STEP, row_tile=16))
    assert model.decode_time(FOUR_ROWS) - MODEL.decode_time(FOUR_ROWS) == 3 * 12


def test_attention_that_shares_nothing_reads_every_row_s_context() -> None:
    naive = replace(MODEL, prefix_shared=False)
    assert naive.decode_time(FOUR_ROWS) - MODEL.decode_time(FOUR_ROWS) == 0.5 * (100 - 40)
    assert naive.prefill_time(FOUR_ROWS) == MODEL.prefill_time(FOUR_ROWS)


def test_experts_are_read_as_tokens_need_them() -> None:
    model = replace(MODEL, decode=replace(STEP, experts=Experts(read_s=100.0, token_share=0.5)))
    assert model.decode_time(FOUR_ROWS) - MODEL.decode_time(FOUR_ROWS) == 100 * (1 - 0.5**4)


SECONDS = st.floats(0, 1e-3)
COUNTS = st.integers(0, 100_000)


@given(
    st.builds(StepCoefficients, *[SECONDS] * 6, st.integers(1, 64), st.builds(Experts, SECONDS), st.booleans()),
    st.builds(StepShape, *[COUNTS] * 5),
    st.booleans(),
)
def test_steps_seen_ahead_take_exactly_what_they_take_one_by_one(
    costs: StepCoefficients, shape: StepShape, prefix_shared: bool
) -> None:
    cost = DecodeCost(replace(MODEL, decode=costs, prefix_shared=prefix_shared))
    one_by_one = [cost(shape.after(num_steps)) for num_steps in range(20)]
    assert list(islice(times_of(cost)(shape), 20)) == one_by_one


def test_a_transfer_takes_its_latency_and_its_bytes() -> None:
    assert MODEL.link.busy_time(8) == 2.0
    assert MODEL.link.idle_time(8) == 2.0 + 2 * 0.5


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    model = replace(MODEL, prefix_shared=False, notes=("fitted to a.json",))
    save_model(model, tmp_path / "costs.json")
    assert load_model(tmp_path / "costs.json") == model


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no cost model"),
        ("{}", "missing required field `name`"),
        ('{"name": 3}', r"Expected `str`, got `int` - at `\$.name`"),
    ],
)
def test_a_file_that_is_no_model_is_told_what_it_lacks(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load_model(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("part", "name", "value", "problem"),
    [
        ("decode", "row_s", -1.0, "negative"),
        ("decode", "row_tile", 0, "row_tile"),
        ("link", "byte_s", -1e-9, "byte_s"),
        ("link", "byte_s", 1e300, "byte_s"),
        ("link", "latency_s", -1e-3, "latency_s"),
        ("front", "message_s", -1.0, "negative"),
        ("contention", "decode_slowed", -5.0, "negative"),
    ],
)
def test_coefficients_that_nothing_has_are_refused(
    tmp_path: Path, part: str, name: str, value: float, problem: str
) -> None:
    path = tmp_path / "costs.json"
    save_model(MODEL, path)
    model = json.loads(path.read_text())
    path.write_text(json.dumps({**model, part: {**model[part], name: value}}))
    with pytest.raises(ConfigError, match=f"costs.json is no cost model: .*{problem}"):
        load_model(path)


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        save_model(MODEL, tmp_path / "nowhere" / "costs.json")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    save_model(replace(MODEL, device="tpu"), tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="'tpu' is neither cpu nor cuda"):
        load_model(tmp_path / "costs.json")
