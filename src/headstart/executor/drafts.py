"""Which of a row's drafts were right."""

from collections.abc import Sequence

from headstart.core.batch import Row, Sampled


def accepted(row: Row, drawn: Sequence[Sampled]) -> Sampled:
    """What the row drew, given what each of its positions drew: up to and with the first token that is no draft.

    `drawn[j]` comes from the logits behind the first j drafts; it counts if those were drawn themselves.
    """
    first = len(row.tokens) - row.num_drafts
    kept = 1
    while kept <= row.num_drafts and drawn[kept - 1].token_ids == (int(row.tokens[first + kept - 1]),):
        kept += 1
    good = [one for one in drawn[:kept] if one.error is None]
    if not good:
        return drawn[0]
    return Sampled(
        row.row_id,
        tuple(token for one in good for token in one.token_ids),
        tuple(value for one in good for value in one.logprobs),
        tuple(best for one in good for best in one.top_logprobs),
    )
