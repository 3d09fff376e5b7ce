"""Model types whose kind is not built, with the reason for each. Never imports torch.

Only what holds for every configuration of a type stands here; what a configuration decides is a rule of `refusals.py`.
Types that are not listed are tried: the self-test decides when they are loaded.
"""

_ENCODERS = "is made of an encoder's blocks whose attention is not reached through the library's attention interface"
_STATE = "keeps a recurrent state beside or instead of keys and values, which is not built"
_ALIBI = "biases attention scores by distance (ALiBi), which is not built"
_DECODER = "is the decoder half of an encoder-decoder model; only causal language models are served"
_OWN = "computes attention in its own code and not through the library's attention interface"

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = ()

NOT_BUILT: dict[str, str] = {name: reason for reason, names in _KINDS for name in names}
