"""The records behind ``tests/golden/``. Run as a module to write files that are not there yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from infra.contracts.json_codec import to_json
from infra.contracts.manifests import (
    BaseVersion,
    ControlState,
    Flight,
    LedgerEntry,
    TensorDelta,
    TensorEntry,
    TensorPiece,
    WeightManifest,
    WeightPart,
)
from infra.contracts.records import (
    Decision,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Group,
    Message,
    Sample,
    SamplingParams,
)
from infra.contracts.rollout_codec import encode_groups
from infra.shards.shard_writer import write_shard
from infra.storage.memory_store import MemoryStore
from tests.builders import RECIPE, make_group, make_group_id, make_task

FOLDER = Path(__file__).parent / "golden"


def _rich_group() -> Group:
    """A group that uses every field that has a default."""
    group = make_group(1, n=3, version=4, rewards=[1.0, 0.0, 0.25])
    prompt = replace(
        group.prompt,
        messages=(Message(role="system", content="Be brief.\n"), *group.prompt.messages),
        tests=("assert f(1) == 2",),
        metadata={"level": "2", "topic": "súms"},
    )
    first, *rest = group.rollouts
    first = replace(
        first,
        sequence_index=1,
        token_columns={
            "reference_logprobs": np.array([-1.5, -0.5, -0.25], np.float32),
            "routing": np.array([1, 2, 3], np.uint8),
        },
        spans=((0, 2, "model", "stop"), (2, 3, "tool", "")),
        loss_mask=np.array([True, True, False]),
        policy_versions=np.array([4, 5, 5], np.int32),
        weights=((4, "weights-4"), (5, "weights-5")),
        finish_reason=FinishReason.LENGTH,
        sampling=SamplingParams(
            n=3, max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=40, stop=("\n",)
        ),
    )
    return replace(group, prompt=prompt, rollouts=(first, *rest), attempt=2)


GROUPS = (make_group(0), _rich_group())

_STORE = MemoryStore()
_MANIFEST = write_shard(_STORE, GROUPS, recipe_digest=RECIPE, now=1.5)

_SAMPLE = Sample(
    response_ids=np.array([5, 6, 7], np.int32),
    response_text=" 42\u00e9",
    behaviour_logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
    raw_logprobs=np.array([-0.1, -0.25, -0.5], np.float32),
    policy_versions=np.array([3, 3, 4], np.int32),
    finish_reason=FinishReason.STOP,
)

WEIGHT_MANIFEST_1 = WeightManifest(
    run="test",
    version=4,
    digest="weights-4",
    parts=(WeightPart(key="weights/v00000004/ab.safetensors", size_bytes=24),),
    tensors=(
        TensorEntry(
            name="model.norm.weight",
            shape=(2, 3),
            dtype="F32",
            part=0,
            offset=0,
            size_bytes=24,
            crc32c=123,
        ),
    ),
    parent="weights-3",
    optimizer_step=8,
    model_config={"layers": 2, "rope": {"base": 10000.0}, "tied": True, "names": ["a"]},
    tokenizer_digest="tokenizer",
    incarnation="trainer-1",
    created_at=2.5,
    schema_version=1,
)
"""What ``weight_manifest.json`` says, which schema 1 wrote."""

GENERATE_REQUEST = GenerateRequest(
    request_id="request-1",
    messages=make_task(3).prompt.messages,
    sampling=SamplingParams(n=2, stop=("###",)),
    seeds=(11, 12),
    min_version=2,
    timeout_secs=30.0,
)
"""What ``generate_request.json`` says, which clients without segments wrote."""

RECORDS = {
    "group_task_v2": make_task(3, n=4, version=2, attempt=2),
    "generate_request_segment_v2": replace(
        GENERATE_REQUEST, segment_tokens=64, so_far=((4, 5), ())
    ),
    "generate_reply_v2": GenerateReply(
        request_id="request-1",
        prompt_ids=np.array([1, 2, 3], np.int32),
        samples=(_SAMPLE,),
        weights=((3, "weights-3"), (4, "weights-4")),
        engine="slots-1",
        dtype="float32",
        tokenizer_digest="tokenizer",
    ),
    "group_undecided_v2": make_group(2, decision=None),
    "group_failed_v2": make_group(3, decision=Decision.FAILED),
    "group_rich_v2": _rich_group(),
    "shard_manifest": _MANIFEST,
    "weight_manifest_delta": replace(
        WEIGHT_MANIFEST_1,
        schema_version=2,
        updated_at=2.25,
        tensors=(
            replace(
                WEIGHT_MANIFEST_1.tensors[0],
                part=-1,
                axis=1,
                pieces=(
                    TensorPiece(part=-1, offset=0, size_bytes=8, crc32c=5),
                    TensorPiece(part=0, offset=64, size_bytes=8, crc32c=6, blocks=(7,)),
                ),
            ),
        ),
        epoch=3,
        cast="bfloat16",
        base=BaseVersion(version=3, digest="weights-3"),
        deltas=(
            TensorDelta(
                name="model.norm.weight",
                piece=0,
                part=0,
                offset=8,
                size_bytes=4,
                crc32c=9,
                raw_bytes=10,
                changed=1,
                far=1,
                wide=0,
            ),
        ),
    ),
    "ledger_entry": LedgerEntry(
        step=2,
        groups=((make_group_id(0), "shard-a"), (make_group_id(1), "shard-b")),
        dropped=((make_group_id(2), "stale"),),
        lag_max=1,
        violations=1,
        incarnation="trainer-1",
        settings_digest="settings",
        created_at=3.5,
    ),
    "control_state": ControlState(
        run="test",
        epoch=3,
        next_index=7,
        flights=(
            Flight(
                admission_index=6,
                group_id=make_group_id(6),
                min_version=2,
                attempt=2,
                leased_until=99.5,
            ),
        ),
        cursors={"addition": 7},
        refills=1,
        untrainable_streak=2,
        draining=True,
        reissued=1,
        stop_reason="updates_reached",
    ),
}


BEFORE_SAMPLING_OPTIONS = [name for name in RECORDS if name.endswith("_v2")]
"""Records that sampling options grew: the files without ``_v2`` say the same without them."""

OPTIONS = SamplingParams(
    n=3,
    max_new_tokens=8,
    min_p=0.05,
    min_new_tokens=2,
    stop_token_ids=(7,),
    ignore_eos=True,
    banned_token_ids=(3, 5),
    logit_bias=((9, -1.5),),
    max_thinking_tokens=16,
    thinking_marks=("<think>", "</think>"),
)
GROUPS_2 = (
    GROUPS[0],
    replace(
        GROUPS[1],
        rollouts=tuple(replace(r, sampling=OPTIONS) for r in GROUPS[1].rollouts),
    ),
)
"""A shard of schema version 2."""
_MANIFEST_2 = write_shard(_STORE, GROUPS_2, recipe_digest=RECIPE, now=1.5)


def _write_missing() -> None:
    schema = encode_groups(()).schema
    files = {f"{name}.json": to_json(record) for name, record in RECORDS.items()}
    files["shard-v1.parquet"] = _STORE.read(_MANIFEST.data_key)
    files["shard-v2.parquet"] = _STORE.read(_MANIFEST_2.data_key)
    files["schema-v1.txt"] = "".join(f"{f.name}: {f.type}\n" for f in schema).encode()
    for name, data in files.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(data)
            print(f"wrote {name}")


if __name__ == "__main__":
    _write_missing()
