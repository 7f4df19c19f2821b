import json

import pytest

from infra.contracts.errors import ConfigError, InferenceError
from infra.inference.fake_client import FakeInferenceClient
from pipelines.evaluate_policy import main
from tests.infra.inference.worker_server import WorkerServer
from tests.pipelines.run_folder import CONFIG, make_run


@pytest.fixture
def worker():
    server = WorkerServer(FakeInferenceClient(respond=add))
    yield server
    server.close()


def add(request, index):
    """Greedy answers are right for even sums; of four samples only the first is ever right."""
    question = request.messages[0].content.rstrip().splitlines()[-1]
    left, _, right = question.removeprefix("Q:").partition("+")
    digits = "".join(c for c in right if c.isdigit())
    total = int("".join(c for c in left if c.isdigit())) + int(digits)
    right_answer = total % 2 == 0 if request.sampling.temperature == 0 else index == 0
    return f" {total if right_answer else total + 2}\n"


def evaluated(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_pass_rates_are_counted_kept_and_not_made_again(tmp_path, worker, capsys):
    store = make_run(tmp_path)
    result = evaluated(capsys, str(tmp_path), "--endpoint", worker.url)
    assert (result["version"], result["problems"], result["samples"]) == (0, 10, 4)
    greedy = [r for r in worker.fake.requests if r.sampling.temperature == 0]
    passes = sum(int(add(r, 0)) % 2 == 0 for r in greedy)
    assert (result["passes"], result["pass_rate"]) == (passes, passes / 10)
    assert result["interval"][0] < result["pass_rate"] < result["interval"][1]
    assert result["pass_at_k"] == {"1": 0.25, "2": 0.5, "4": 1.0}
    assert len(store.list_after("evaluations/")) >= 3, "shard, manifest and result"

    calls = worker.calls
    assert evaluated(capsys, str(tmp_path), "--endpoint", worker.url) == result
    assert worker.calls == calls
    other = evaluated(capsys, str(tmp_path), "--endpoint", worker.url, "--samples", "0")
    assert other["pass_at_k"] == {}
    assert other["passes"] == passes


def test_another_version_than_asked_is_an_error_and_does_not_stick(tmp_path, worker, capsys):
    make_run(tmp_path, versions=2)
    worker.fake.version = 1
    argv = [str(tmp_path), "--endpoint", worker.url, "--samples", "0", "--version", "0"]
    with pytest.raises(InferenceError, match=r"version 0 was asked for and \[1\] answered"):
        main(argv)
    worker.fake.version = 0
    assert main(argv) == 0
    assert "version 0:" in capsys.readouterr().out


def test_a_worker_that_refuses_is_an_error(tmp_path, worker):
    make_run(tmp_path)
    worker.script = lambda n: (400, b'{"error":"no"}')
    with pytest.raises(InferenceError, match=r"problems failed: InferenceError: .*no"):
        main([str(tmp_path), "--endpoint", worker.url, "--problems", "2", "--samples", "0"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--version", "7"], "--version 7 is not kept in this run; there are: 0"),
        (["--problems", "0"], "problems must be >= 1"),
        (["--nonsense"], "unknown option '--nonsense'"),
    ],
)
def test_mistakes_are_named(tmp_path, argv, says):
    make_run(tmp_path)
    with pytest.raises(ConfigError, match=says):
        main([str(tmp_path), "--endpoint", "http://127.0.0.1:9", *argv])


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(ConfigError, match="there is no run"):
        main([str(tmp_path / "nowhere")])
    make_run(tmp_path / "a", versions=0)
    with pytest.raises(ConfigError, match="no version is published"):
        main([str(tmp_path / "a")])
    make_run(tmp_path / "b", CONFIG.replace("held_out = 0.2", "held_out = 0.0"))
    with pytest.raises(ConfigError, match="no held-out prompts"):
        main([str(tmp_path / "b"), "--endpoint", "http://127.0.0.1:9"])
