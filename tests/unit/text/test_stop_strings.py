"""Text ends at the first stop string, wherever it is cut into pieces, and nothing of a stop string leaks."""

from hypothesis import given
from hypothesis import strategies as st

from headstart.text.stop_strings import StopMatcher

ALPHABET = "ab\n"


def run(stops, pieces):
    matcher = StopMatcher(tuple(stops))
    out = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        out.append(matcher.finish())
    return "".join(out), matcher.matched


@given(
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
)
def test_any_cut_gives_the_text_before_the_first_stop_string(stops, pieces):
    text = "".join(pieces)
    shown, matched = run(stops, pieces)
    if matched is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)


def test_a_prefix_of_a_stop_string_is_held_until_it_is_none():
    matcher = StopMatcher(("STOP",))
    assert matcher.push("say ST") == "say "
    assert matcher.push("A") == "STA"
    assert matcher.push("STO") == ""
    assert matcher.push("P more") == ""
    assert matcher.matched == "STOP"
    assert matcher.push("ignored") == ""


def test_without_stop_strings_nothing_is_held():
    assert StopMatcher(()).push("anything") == "anything"
