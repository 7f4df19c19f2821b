"""The peers' protocol with made-up peers, and the workload that all of them get."""

import sys

import pytest

from benchmarks.engine import summary
from benchmarks.engine_peers import Peer, PeerFailed
from benchmarks.engine_workload import group_work
from benchmarks.peers.peer_loop import batches
from infra.text.tokenizer import load_tokenizer, write_char_tokenizer

PEER = """
import sys
from benchmarks.peers.peer_loop import serve
def load(args):
    print("noise of a library")
    if args.model == "none":
        sys.exit("no such model")
    return f"peer, {args.threads} threads", lambda p, n, slots: sum(map(sum, n)) + (slots < 2)
serve(load)
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, " abcdefghijklmnopqrstuvwxyz.", eos=".")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_SHARED_DATA", str(folder))  # no data there: words
        return group_work(load_tokenizer(folder), 3, 8, divisor=8, room=400)


def opened(tmp_path, model):
    options = ["--model", model, "--dtype", "float32", "--threads", "2", "--max-len", "9"]
    return Peer("made-up", [sys.executable, "-c", PEER, *options], tmp_path / "log")


def test_a_peer_answers_and_one_that_counts_wrong_has_failed(work, tmp_path):
    peer = opened(tmp_path, "some")
    try:
        assert peer.read() == {"ready": "peer, 2 threads"}
        assert peer.secs(work, 32) > 0
        with pytest.raises(PeerFailed, match=f"made-up: {work.tokens + 1} tokens, not"):
            peer.secs(work, 1)
    finally:
        peer.close()


def test_a_peer_that_ends_says_why(work, tmp_path):
    peer = opened(tmp_path, "none")
    with pytest.raises(PeerFailed, match="made-up: no such model"):
        peer.read()
    with pytest.raises(PeerFailed, match="no such model"):
        peer.secs(work, 32)
    peer.close()


def test_groups_have_a_prompt_each_and_long_tailed_lengths(work):
    assert [len(own) for own in work.lengths] == [8, 8, 8]
    assert len(set(map(tuple, work.prompts))) == 3
    longest = max(map(len, work.prompts)) + max(work.flat_lengths)
    assert longest < 400 and min(work.flat_lengths) >= 2
    requests = work.requests("r")
    assert [seed for request in requests for seed in request.seeds] == list(range(24))
    assert [len(r.messages[0].content) for r in requests] == [len(p) for p in work.prompts]


def test_static_batches_hold_every_row_shortest_prompts_first():
    rows = [row for batch in batches([[1, 2, 3], [4]], [[5, 6], [7, 8, 9]], 2) for row in batch]
    assert rows == [([4], 7), ([4], 8), ([4], 9), ([1, 2, 3], 5), ([1, 2, 3], 6)]


def test_a_peer_that_is_not_there_is_null():
    groups = {"float32": {"32x8": {"over_ours": {"ours": 1.0, "tunix": 2.0}}}}
    figures = summary({"peers": groups})
    assert (figures["vs_transformers"], figures["vs_tunix"]) == (None, 2.0)
    assert summary({})["vs_llamacpp"] is None
