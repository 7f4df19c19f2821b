"""Every path of a run, computed here and nowhere else (DESIGN section 4).

Keys are relative to the run's root, the same for a local folder and a bucket.
"""

from __future__ import annotations

from infra.contracts.records import Decision

RUN_CONFIG = "run.toml"
CONTROL_STATE = "control/state.json"
CONTROL_DONE = "control/done.json"
WEIGHTS_LATEST = "weights/LATEST"
WEIGHTS_LEASES = "control/leases/"
TRAINER_INCARNATION = "control/trainer.json"
SUMMARY = "summary.json"
REPORT = "report.html"
INIT_MODEL = "init"
CHECKPOINTS = "checkpoints"
COMMANDS = "control/commands/"
"""Prefix of every operator's wish; see ``command``."""
LAUNCHER_STATE = "control/launcher.json"
"""Wall time so far and the evaluations: what a resumed ``headrace run`` goes on from."""
INIT_DONE = "control/init.json"
"""Marks ``init`` as whole: made by the warm start, or by ``headrace branch``."""
LINEAGE = "lineage.json"
"""Where a branched run comes from: parent run, version, digest."""
LOGS = "logs"
"""Local only: what each role printed, and the launcher's lock."""
LAUNCHER_LOCK = "logs/launcher.lock"

BLOCK_SIZE = 1024
"""Admission indices per folder of shards; readers list only blocks above their watermark."""


def heartbeat(role: str) -> str:
    return f"control/heartbeats/{role}.json"


def weights_folder(version: int) -> str:
    return f"weights/v{version:08d}"


def weights_part(version: int, digest: str) -> str:
    return f"{weights_folder(version)}/{digest}.safetensors"


def weights_delta(version: int, digest: str) -> str:
    return f"{weights_folder(version)}/{digest}.delta"


def weights_manifest(version: int) -> str:
    return f"{weights_folder(version)}/MANIFEST.json"


def weights_lease(name: str) -> str:
    """Who still needs which version, for long (an evaluation, a branch)."""
    return f"{WEIGHTS_LEASES}{name}.json"


def version_of_folder(name: str) -> int:
    """Inverse of ``weights_folder`` for the last path component, e.g. ``v00000012`` -> 12."""
    return int(name.removeprefix("v"))


def block_of(admission_index: int) -> int:
    return admission_index // BLOCK_SIZE


def block_folder(decision: Decision, block: int) -> str:
    return f"{decision.value}/{block:08d}"


def shard_data(decision: Decision, block: int, digest: str) -> str:
    return f"{block_folder(decision, block)}/{digest}.parquet"


def shard_manifest(decision: Decision, block: int, digest: str) -> str:
    return f"{block_folder(decision, block)}/{digest}.manifest.json"


def ledger_step(step: int) -> str:
    return f"ledger/step-{step:08d}.json"


def metrics_part(role: str, incarnation: str, sequence: int) -> str:
    return f"metrics/{role}/{incarnation}-{sequence:08d}.json"


def log(role: str) -> str:
    """What a role printed, all its processes one after another; not an object, a growing file."""
    return f"{LOGS}/{role}.log"


def command(name: str) -> str:
    """An operator's or the launcher's wish, created once: ``drain``, ``pause``."""
    return f"control/commands/{name}.json"


def evaluation(version: int, digest: str) -> str:
    """Result of one evaluation; ``digest`` names prompts, sampling and recipe."""
    return f"evaluations/v{version:08d}-{digest}.json"


def quarantine(key: str) -> str:
    return f"quarantine/{key}.json"
