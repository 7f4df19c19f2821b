"""llama.cpp under a scheduler like ours: slots refilled as they become free, one prefill per group.

What its server does with ``n`` completions of a prompt, without the server's own costs: the prompt
is computed once, in a sequence of its own, and copied (``llama_memory_seq_cp``) into each slot.
"""

from __future__ import annotations

import argparse
from collections import deque

import llama_cpp as lib

from benchmarks.peers.gguf_copy import gguf_of
from benchmarks.peers.peer_loop import Answer, serve


class Slots:
    """A context of ``slots`` sequences and one more, where the next group's prompt lies."""

    def __init__(self, model: object, slots: int, threads: int, max_len: int) -> None:
        params = lib.llama_context_default_params()
        params.n_seq_max = slots + 1
        params.n_ctx = (slots + 1) * max_len
        params.n_batch = params.n_ubatch = max(512, slots)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        self._context = lib.llama_init_from_model(model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self._sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(self._sampler, lib.llama_sampler_init_dist(0))
        self._count, self._spare = slots, slots

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_sampler_free(self._sampler)
        lib.llama_free(self._context)

    def answer(self, prompts: list[list[int]], lengths: list[list[int]]) -> int:
        waiting = deque(
            (prompt, length, i == 0)
            for prompt, own in zip(prompts, lengths, strict=True)
            for i, length in enumerate(own)
        )
        live: dict[int, list[int]] = {}  # by slot: next token, its position, tokens to draw
        tokens = 0
        while waiting or live:
            for slot in range(self._count):
                if slot in live or not waiting:
                    continue
                prompt, length, first = waiting.popleft()
                if first:
                    self._prefill(prompt[:-1])
                lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                lib.llama_memory_seq_cp(self._memory, self._spare, slot, -1, -1)
                live[slot] = [prompt[-1], len(prompt) - 1, length]
            for slot, token in self._step(live).items():
                tokens += 1
                _, position, left = live.pop(slot)
                if left > 1:
                    live[slot] = [token, position + 1, left - 1]
        return tokens

    def _prefill(self, prompt: list[int]) -> None:
        lib.llama_memory_seq_rm(self._memory, self._spare, -1, -1)
        self._decode([(token, i, self._spare) for i, token in enumerate(prompt)], draws=False)

    def _step(self, live: dict[int, list[int]]) -> dict[int, int]:
        self._decode([(token, at, slot) for slot, (token, at, _) in live.items()], draws=True)
        sample = lib.llama_sampler_sample
        return {slot: sample(self._sampler, self._context, i) for i, slot in enumerate(live)}

    def _decode(self, rows: list[tuple[int, int, int]], *, draws: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = draws
        code = lib.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")


def load(args: argparse.Namespace) -> tuple[str, Answer]:
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    path = gguf_of(args.gguf, args.dtype)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    found: dict[int, Slots] = {}

    def answer(prompts: list[list[int]], lengths: list[list[int]], slots: int) -> int:
        if slots not in found:
            for old in found.values():
                old.close()
            found.clear()
            found[slots] = Slots(model, slots, args.threads, args.max_len)
        return found[slots].answer(prompts, lengths)

    answer.quiet = quiet  # the library keeps calling it
    return f"llama-cpp-python {lib.__version__}", answer


if __name__ == "__main__":
    serve(load)
