"""Flags of other servers, by the names that their users type, and what Headstart calls them."""

from collections.abc import Sequence

from headstart.config.errors import ConfigError

MODEL_IS_FIRST = "the model is the first argument: headstart serve MODEL"

OURS: dict[str, str] = {
    "--model": MODEL_IS_FIRST,
    "--model-path": MODEL_IS_FIRST,
    "--tokenizer": "the tokenizer is read from the model's folder",
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--num-gpu-blocks-override": "--max-total-tokens",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--tensor-parallel-size": "--tp-size",
    "-tp": "--tp-size",
    "--tp": "--tp-size",
    "--data-parallel-size": "--decode",
    "--dp-size": "--decode",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enable-prefix-caching": "the radix cache is on unless --disable-radix-cache",
    "--hf-overrides": "--json-model-override-args",
    "--allowed-origins": "--cors-origins",
    "--enable-log-requests": "--log-requests",
    "--uvicorn-log-level": "--log-level",
    "--log-json": "--log-format json",
    "--trust-remote-code": "code of models is never run; leave it out",
    "--quantization": "quantised weights are not built",
    "--disaggregation-mode": "--prefill and --decode of `headstart serve`, or the commands `headstart prefill` and `headstart decode`",
    "-p": "--port",
}
"""Flag of another server -> ours, or a sentence."""


def refuse_other_names(arguments: Sequence[str], ours: Sequence[str] = ()) -> None:
    """Raise ConfigError for each flag that another server knows and this command does not; `ours` are its own."""
    named = [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("-")]
    hints = [f"{name}: {_hint(OURS[name])}" for name in named if name in OURS and name not in ours]
    if hints:
        raise ConfigError("\n  ".join(["flags of another server:", *hints]) if len(hints) > 1 else hints[0])


def _hint(meant: str) -> str:
    return f"here it is {meant}" if meant.startswith("--") else meant
