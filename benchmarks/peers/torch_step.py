"""One GRPO step of torch and transformers, as TRL makes it: padded rows, whole logits, AdamW.

    in   {"model": folder, "prompts": [[id, ...]], "answers": [[id, ...]], "advantages": [...],
          "threads": 2, "repeats": 3, "dtype": "float32"}
    out  {"ready": "transformers 5.24.0, torch 2.9.1", "secs": [...], "rss_bytes": ...}

Prompts are padded on the left, answers on the right; logits are computed for answer positions only;
old log-probs are the detached ones (one optimizer call per batch); no gradient checkpointing, which
would be slower. Runs in the peers' own environment: nothing of ours is imported.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

import torch
import transformers


def main() -> None:
    # Libraries print as they please: the answer's way out is not their standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = json.load(sys.stdin)
    torch.set_num_threads(work["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=getattr(torch, work["dtype"])
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95))
    ids, attention, mask = padded(work["prompts"], work["answers"])
    advantages = torch.tensor(work["advantages"])[:, None]
    secs = []
    for _ in range(work["repeats"] + 1):  # the first one warms up
        started = time.perf_counter()
        step(model, optimizer, ids, attention, mask, advantages)
        secs.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ready = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(json.dumps({"ready": ready, "secs": secs[1:], "rss_bytes": peak}), file=out)


def padded(prompts: list, answers: list) -> tuple[torch.Tensor, ...]:
    """(ids, attention, answer mask)"""
    before, after = max(map(len, prompts)), max(map(len, answers))
    ids = torch.zeros((len(prompts), before + after), dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros((len(prompts), after))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = before - len(prompt), before + len(answer)
        ids[i, start:end] = torch.tensor(prompt + answer)
        attention[i, start:end] = 1
        mask[i, : len(answer)] = 1
    return ids, attention, mask


def step(model, optimizer, ids, attention, mask, advantages) -> None:
    kept = mask.shape[1]
    logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=kept + 1).logits[:, :-1]
    chosen = torch.gather(logits, -1, ids[:, -kept:, None])[..., 0]
    # Row by row: a log-softmax of everything at once would hold the logits twice more.
    totals = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    logprobs = (chosen - totals).float()
    ratio = torch.exp(logprobs - logprobs.detach())
    best = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = -(best * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert torch.isfinite(loss)


if __name__ == "__main__":
    main()
