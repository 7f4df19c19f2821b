"""What a request record's own checks do not cover, for every page that generates."""

from __future__ import annotations

from infra.contracts.errors import SchemaMismatch
from infra.contracts.json_codec import from_json
from infra.contracts.records import GenerateRequest
from trainer.inference_worker.http.http_limits import Refused

MAX_SAMPLES = 4096
MAX_TIMEOUT_SECS = 24 * 3600.0
COLDEST, HOTTEST = 1e-4, 1e4
"""Beyond these a float32 logit over the temperature may overflow, and log-probs turn to NaN."""


def parse_record(body: bytes, vocab: int) -> GenerateRequest:
    """Decode and check a native body; ids must be below ``vocab``. Raises ``Refused``."""
    try:
        request = from_json(GenerateRequest, body)
    except SchemaMismatch as e:
        raise Refused(400, str(e)) from e
    problems = wrong_values(request)
    if any(not 0 <= token < vocab for ids in request.so_far for token in ids):
        problems = problems or f"so_far has an id outside [0, {vocab})"
    if problems:
        raise Refused(400, problems)
    return request


def wrong_values(request: GenerateRequest) -> str:
    """Say what is wrong with a request; empty: nothing."""
    sampling = request.sampling
    temperature = sampling.temperature
    checks = (
        (0 < len(request.request_id) <= 200, "request_id must have 1 to 200 characters"),
        (is_unicode(request.request_id), "request_id is not valid Unicode"),
        (sampling.n <= MAX_SAMPLES, f"n = {sampling.n}; at most {MAX_SAMPLES}"),
        (len(request.seeds) == sampling.n, f"{len(request.seeds)} seeds for n = {sampling.n}"),
        (all(0 <= s < 2**32 for s in request.seeds), "seeds must be in [0, 2^32)"),
        (sampling.max_new_tokens < 2**31, f"max_new_tokens = {sampling.max_new_tokens}; too many"),
        (
            temperature == 0 or COLDEST <= temperature <= HOTTEST,
            f"temperature = {temperature:g}; 0, or from {COLDEST:g} to {HOTTEST:g}",
        ),
        (sampling.top_k < 2**31, f"top_k = {sampling.top_k}; below 2^31"),
        (len(sampling.stop) <= 16, f"{len(sampling.stop)} stop strings; at most 16"),
        (all(len(s) <= 256 for s in sampling.stop), "a stop string is longer than 256 characters"),
        (all(map(is_unicode, sampling.stop)), "a stop string is not valid Unicode"),
        (0 <= request.segment_tokens < 2**31, "segment_tokens must be in [0, 2^31)"),
        (
            len(request.so_far) in (0, sampling.n),
            f"so_far of {len(request.so_far)} samples for n = {sampling.n}; none or all",
        ),
        (0 < request.timeout_secs <= MAX_TIMEOUT_SECS, "timeout_secs must be in (0, 86400]"),
    )
    return "; ".join(text for ok, text in checks if not ok)


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8; JSON can say half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
