"""Text ends at the first stop string, wherever it is cut into pieces, and nothing of a stop string leaks."""

from hypothesis import example, given
from hypothesis import strategies as st

from headstart.text.stop_strings import StopMatcher, StopStrings

ALPHABET = "ab\n"


def run(stops, pieces, include=False):
    matcher = StopMatcher(StopStrings(tuple(stops)), include)
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


def first_end(stops, text):
    """The stop string that a reader of single characters sees complete first, the longest of those, and its end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None, None


@given(
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.booleans(),
)
@example(["ab", "abc"], ["a", "bc"], False)
@example(["ab", "abc"], ["abc"], False)
@example(["b", "ab"], ["a", "b"], True)
@example(["bc", "abcd"], ["abcd"], False)
def test_the_stop_string_that_is_reported_does_not_depend_on_the_cut(stops, pieces, include):
    text = "".join(pieces)
    matched, end = first_end(stops, text)
    shown = text if matched is None else text[: end if include else end - len(matched)]
    assert run(stops, pieces, include) == (shown, matched)
    assert run(reversed(stops), list(text), include) == (shown, matched)


class CountingStops(StopStrings):
    num_steps = 0

    def step(self, state, char):
        self.num_steps += 1
        return super().step(state, char)


def test_long_stop_strings_cost_one_step_a_character_and_hold_back_no_more_than_their_length():
    stops = CountingStops(tuple("a" * length + "b" for length in range(1008, 1024)))
    stops.num_steps = 0
    matcher, given = StopMatcher(stops), 0
    for num_pushed in range(1, 5001):
        given += len(matcher.push("a"))
        assert num_pushed - given <= 1023
    assert stops.num_steps == 5000
    assert (matcher.push("b"), matcher.matched) == ("", "a" * 1023 + "b")


def test_text_that_begins_no_stop_string_is_not_read():
    stops = CountingStops(("STOP", "###"))
    stops.num_steps = 0
    assert StopMatcher(stops).push("a long text\n" * 1000) == "a long text\n" * 1000
    assert stops.num_steps == 0


def test_a_prefix_of_a_stop_string_is_held_until_it_is_none():
    matcher = StopMatcher(StopStrings(("STOP",)))
    assert matcher.push("say ST") == "say "
    assert matcher.push("A") == "STA"
    assert matcher.push("STO") == ""
    assert matcher.push("P more") == ""
    assert matcher.matched == "STOP"
    assert matcher.push("ignored") == ""


def test_without_stop_strings_nothing_is_held():
    assert StopMatcher(StopStrings(())).push("anything") == "anything"
