"""The sweep over the library's causal-language-model classes: each is served like `generate`, or refused with a reason.

python -m tests.models.sweep        rewrites docs/models.md from what every class does
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as library_logging

from headstart.executor.build import ExecutorConfig
from headstart.model.refusals import refuse_unservable
from headstart.model.refused import ModelRefused
from headstart.model.source import WeightSource
from tests.models.tiny import VOCAB, class_name, model_types, tiny_config, write_config, write_weights
from tests.unit.executor.world import NOISE, Sequence_, World

DOC = Path(__file__).parents[2] / "docs" / "models.md"
NUM_TOKENS = 5
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one class: served, or refused with a reason, from its configuration alone or by the self-test."""

    model_type: str
    reason: str = ""  # empty: served
    is_early: bool = False  # refused before torch was needed

    @property
    def is_served(self) -> bool:
        return not self.reason

    @property
    def row(self) -> str:
        outcome = "served" if self.is_served else f"refused: {self.reason}"
        return f"| `{self.model_type}` | {class_name(self.model_type)} | {outcome} |"


def judge(model_type: str, folder: Path) -> Verdict:
    """Build the class tiny in `folder`; then either it is refused, or every way of serving it gives what `generate` does.

    Raises AssertionError for an answer that differs, and whatever else goes wrong: neither is a refusal.
    """
    config = tiny_config(model_type)
    write_config(folder, config)
    try:
        refuse_unservable(folder, load_format="dummy")
    except ModelRefused as refusal:
        return Verdict(model_type, _reason(refusal), is_early=True)
    write_weights(folder, config)
    try:
        world = World(ExecutorConfig(WeightSource(folder), PAGE_SIZE, num_pages=128, dtype="float32"))
    except ModelRefused as refusal:
        return Verdict(model_type, _reason(refusal))
    try:
        check_served(world, reference_model(folder))
    finally:
        world.executor.close()
    return Verdict(model_type)


def reference_model(folder: Path) -> PreTrainedModel:
    """The library's model alone, in float32 with its eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def check_served(world: World, reference: PreTrainedModel) -> None:
    """Cold, warm, second turn, in two chunks, and beside another row: tokens and log-probabilities are `generate`'s."""
    world.executor.pool.data.fill_(torch.nan)  # reading a position that no row has written shows
    first = world.admit(prompt(0, 40))
    served(world, [first], reference)
    warm = world.admit(prompt(0, 40), like=first)
    assert warm.num_computed == 32
    served(world, [warm], reference)
    second = world.admit([*first.tokens, *prompt(1, 9)], like=first)
    assert second.num_computed >= 32
    served(world, [second], reference)
    served(world, [world.admit(prompt(2, 37))], reference, chunk=19)
    served(world, [world.admit(prompt(3, 23)), world.admit(prompt(4, 70)), world.admit(prompt(5, 1))], reference)


def served(world: World, sequences: Sequence[Sequence_], reference: PreTrainedModel, chunk: int = 64) -> None:
    world.generate(sequences, NUM_TOKENS, chunk=chunk, stagger=1, num_top=VOCAB)
    for sequence in sequences:
        assert_generated(sequence, reference)


def assert_generated(sequence: Sequence_, reference: PreTrainedModel) -> None:
    """The outputs are those of `generate`, up to one where its two best logits differ by less than the noise."""
    ids = torch.tensor([sequence.tokens[: sequence.prompt_len]])
    expected = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    wanted = expected.sequences[0, sequence.prompt_len :].tolist()
    for i, logits in enumerate(expected.logits):
        logprobs = torch.log_softmax(logits[0].float(), -1).numpy()
        np.testing.assert_allclose(sequence.logprobs[i], logprobs, atol=NOISE / 2)
        if sequence.outputs[i] != wanted[i]:
            assert logprobs[wanted[i]] - logprobs[sequence.outputs[i]] < NOISE
            return


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB, length)]


def _reason(refusal: ModelRefused) -> str:
    """Of "model type 'x' has …" the part after the name."""
    text = str(refusal)
    _, _, after = text.partition("model type ")
    return after.partition("' ")[2] if after else text


@contextmanager
def quiet_library() -> Iterator[None]:
    """Without the library's warnings about tiny configurations."""
    level = library_logging.get_verbosity()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)


def document(verdicts: Sequence[Verdict]) -> str:
    """docs/models.md."""
    num_served = sum(verdict.is_served for verdict in verdicts)
    num_early = sum(verdict.is_early for verdict in verdicts)
    by_type = sorted(verdicts, key=lambda verdict: verdict.model_type)
    served_rows = [verdict.row for verdict in by_type if verdict.is_served]
    refused_rows = [verdict.row for verdict in by_type if not verdict.is_served]
    return "\n".join(
        [
            "# Models",
            "",
            "Generated by `python -m tests.models.sweep`; a test sees that it is current.",
            "",
            f"Of the {len(verdicts)} model types that the installed transformers maps to a causal language model, "
            f"{num_served} are served and {len(verdicts) - num_served} are refused at start, {num_early} of those from "
            "config.json alone. Each is built with two layers of width 64 and random float32 weights. Served means that "
            "tokens and log-probabilities are those of the library's own `generate` with eager attention: cold, on "
            "cached pages, in a second turn, in two chunks, and beside other rows. Refused means one line that names "
            "the type and the rule, before any worker answers.",
            "",
            "A type that is served here is refused with a configuration that asks for more: sliding or other partial "
            "layers, quantised weights, score caps, unknown rope types. A type that is refused for its layers is tried "
            "if its configuration has full attention in all of them. Whatever the type, a model is served only after "
            "its self-test: at start every layer must call the attention once a step, and the logits of a short prompt "
            "must equal the library's own forward (`--skip-model-self-test` leaves that out).",
            "",
            "Models whose rope has two sets of factors (longrope) are served up to their original context, where the "
            "short factors hold for every position; a longer `--context-length` fixes the long factors for all "
            "requests. transformers chooses them by the longest sequence of a step, which no cached prefix survives.",
            "",
            "## Served",
            "",
            "| model type | class | |",
            "|---|---|---|",
            *served_rows,
            "",
            "## Refused",
            "",
            "| model type | class | |",
            "|---|---|---|",
            *refused_rows,
            "",
        ]
    )


def main() -> int:
    with quiet_library(), tempfile.TemporaryDirectory() as root:
        verdicts = []
        for model_type in model_types():
            verdicts.append(judge(model_type, Path(root) / model_type))
            print(verdicts[-1].row, flush=True)
    DOC.write_text(document(verdicts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
