"""The vendor's exceptions as ours."""

import torch

from headstart.core.errors import WorkerError


def worker_error(error: BaseException, what: str) -> WorkerError:
    """The vendor's exception as ours, in one line that says what can be done."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return WorkerError(
            f"out of GPU memory in {what}; lower --mem-fraction-static, --chunked-prefill-size or --cuda-graph-max-bs"
        )
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return WorkerError(f"the GPU failed in {what}: {type(error).__name__}: {first_line}")
