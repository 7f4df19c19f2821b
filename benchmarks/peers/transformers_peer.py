"""``generate`` of transformers: static batches, padded on the left, its own cache."""

from __future__ import annotations

import argparse

import torch
import transformers

from benchmarks.peers.peer_loop import Answer, batches, serve


def load(args: argparse.Namespace) -> tuple[str, Answer]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    # No end token: a batch goes on until its longest sample has its length.
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def answer(prompts: list[list[int]], lengths: list[list[int]], slots: int) -> int:
        tokens = 0
        for rows in batches(prompts, lengths, slots):
            width, steps = max(len(p) for p, _ in rows), max(n for _, n in rows)
            ids = torch.zeros((len(rows), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for i, (prompt, _) in enumerate(rows):
                ids[i, width - len(prompt) :] = torch.tensor(prompt)
                mask[i, width - len(prompt) :] = 1
            found = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=steps,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
            assert found.shape == (len(rows), width + steps)
            tokens += sum(n for _, n in rows)
        return tokens

    return f"transformers {transformers.__version__}, torch {torch.__version__}", answer


if __name__ == "__main__":
    serve(load)
