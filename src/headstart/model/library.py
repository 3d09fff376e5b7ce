"""What the installed model library knows, read from its files: importing it takes seconds. Never imports torch."""

import importlib.util
import re
from pathlib import Path

_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def causal_model_types() -> frozenset[str]:
    """The model types that transformers maps to a causal language model. Empty if its files do not show them."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        text = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text()
    except OSError:
        return frozenset()
    table = re.search(rf"^{_TABLE} = OrderedDict\(\n(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^\s*\("([^"]+)",', table[1], re.MULTILINE)) if table else frozenset()
