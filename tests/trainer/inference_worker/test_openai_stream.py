"""Text deltas: whole characters, never a stop string, together the final text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.inference_worker.served_worker import VOCABULARY, Pieces
from trainer.inference_worker.http.openai_stream import TextStream, cut


def deltas(ids, stops, decode):
    stream = TextStream(decode, stops)
    pieces = [stream.add(token) for token in ids]
    return [*pieces, stream.finish(decode(list(ids)))]


@given(
    st.text(max_size=40),
    st.lists(st.text(min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_valid_text_comes_in_whole_characters(text, stops, data):
    """Tokens are single bytes, so most of them end inside a character."""
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
    if text and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[at : at + 3]]
    pieces = deltas(text.encode(), stops, decode)
    assert "".join(pieces) == cut(text, stops)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=60))
def test_any_tokens_join_to_the_final_text(ids):
    pieces = deltas(ids, (), Pieces().decode)
    assert "".join(pieces) == Pieces().decode(ids)


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("abc", (), ["a", "b", "c", ""]),
        ("a€b", (), ["a", "", "", "€", "b", ""]),
        ("aQ:b", ("Q:",), ["a", "", "", "", ""]),
        ("aQab", ("Q:",), ["a", "", "Qa", "b", ""]),
        ("aQ", ("Q:",), ["a", "", "Q"]),
    ],
)
def test_what_is_sent_when(text, stops, pieces):
    assert deltas(text.encode(), stops, lambda i: bytes(i).decode(errors="replace")) == pieces


def test_a_token_costs_the_same_at_the_end_of_a_long_response():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return "a" * len(ids)

    stream = TextStream(decode, ())
    for _ in range(1000):
        stream.add(0)
    assert max(lengths) <= 2
