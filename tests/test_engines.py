"""Real vLLM engines on Ray with tiny models: the gate, weight updates, exactness, and what is left when one ends."""

import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from engine_processes import engine_cores
from tiny_models import byte_tokenizer, perturbed, save_model, tiny_model

from raypipe.config import Config, DataConfig, EngineConfig, ModelConfig, RolloutConfig
from raypipe.engines.vllm import start_engines
from raypipe.engines.vllm_config import CPU_BATCHED_TOKENS
from raypipe.weights import Engines, WeightPublisher, iterate_full_parameters, pack

MAX_PROMPT, MAX_RESPONSE = 64, 448
PROMPT = byte_tokenizer().encode("<|user|>6*7?<|assistant|>")


pytestmark = pytest.mark.usefixtures("ray_session")


def start(folder: Path, run: str):
    config = Config(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(max_prompt_length=MAX_PROMPT),
        rollout=RolloutConfig(max_response_length=MAX_RESPONSE, temperature=1.0),
        engine=EngineConfig(kv_cache_gib=0.25),
    )
    (engine,) = start_engines(config, run)
    ray.get(engine.ready.remote())
    return engine


def request(sample_id: str, **changes) -> dict:
    return {
        "sample_id": sample_id,
        "plan": "plan",
        "prompt_ids": PROMPT,
        "min_version": 0,
        "seed": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 32,
        "stop": [],
    } | changes


def generate(engine, requests: list[dict]) -> list[dict]:
    return ray.get([engine.generate.remote(r) for r in requests], timeout=120)


def greedy(engine, version: int) -> list[dict]:
    """Greedy samples of several prompts; `version` keeps them apart from those of older weights."""
    prompts = [PROMPT, PROMPT[:3], PROMPT + [5, 6, 7], [9]]
    return generate(
        engine,
        [
            request(f"greedy-{version}-{i}", prompt_ids=prompt, temperature=0.0, min_version=version, max_tokens=48)
            for i, prompt in enumerate(prompts)
        ],
    )


def wait_until(condition, what: str, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def processes(engine) -> list[psutil.Process]:
    return engine_cores(psutil.Process(ray.get(engine.ready.remote())["pid"]))


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def publish(engine, model, version: int, **kwargs):
    # Buckets far smaller than a layer, so that layers arrive in parts.
    return WeightPublisher(bucket_bytes=10_000).publish(model, version, [engine], **kwargs)


def reference_logprobs(model, row: dict, prompt: list[int], temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """transformers' log-probs of the row's tokens [T]: temperature first, then what top_p leaves, renormalised."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + row["response_ids"]])).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = (logits / temperature).log_softmax(-1)
    if top_p < 1:
        sorted_TV, order_TV = logprobs_TV.sort(descending=True)
        before_TV = sorted_TV.exp().cumsum(-1) - sorted_TV.exp()
        cut_TV = torch.zeros_like(before_TV, dtype=torch.bool).scatter(-1, order_TV, before_TV >= top_p)
        logprobs_TV = logprobs_TV.masked_fill(cut_TV, -torch.inf).log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]


def assert_same_samples(rows: list[dict], others: list[dict], atol: float = 1e-5):
    for row, other in zip(rows, others, strict=True):
        assert row["response_ids"] == other["response_ids"]
        torch.testing.assert_close(
            torch.tensor(row["engine_logprobs"]), torch.tensor(other["engine_logprobs"]), atol=atol, rtol=0
        )


def check_reload(engine, base, changed):
    """After changed weights and back, the engine must answer as it did fresh; in between as transformers does."""
    fresh = greedy(engine, 0)
    publish(engine, changed, 1)
    moved = greedy(engine, 1)
    assert [row["response_ids"] for row in moved] != [row["response_ids"] for row in fresh]
    for row, prompt in zip(moved, [PROMPT, PROMPT[:3], PROMPT + [5, 6, 7], [9]], strict=True):
        want = reference_logprobs(changed, row, prompt, temperature=1.0)
        torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), want, atol=1e-4, rtol=0)
    publish(engine, base, 2)
    assert_same_samples(greedy(engine, 2), fresh)


def test_tied_weights_reload_exactly_and_close_ends_every_process(tmp_path):
    base = tiny_model("qwen2", tied=True)
    engine = start(save_model(base, tmp_path), "tied")
    check_reload(engine, base, perturbed(tiny_model("qwen2", tied=True)))
    left = processes(engine)
    assert left
    ray.get(engine.close.remote())
    wait_until(lambda: not any(map(alive, left)), "EngineCore gone after close")
    ray.kill(engine)


# From here on one engine serves all tests; each update takes the next version.


@pytest.fixture(scope="module")
def base():
    return tiny_model("llama", tied=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, base):
    engine = start(save_model(base, tmp_path_factory.mktemp("untied")), "run")
    yield engine
    ray.kill(engine)


def version(engine) -> int:
    return ray.get(engine.ready.remote())["version"]


def test_untied_weights_reload_exactly(engine, base):
    check_reload(engine, base, perturbed(tiny_model("llama", tied=False)))


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8)])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, base, temperature, top_p):
    rows = generate(
        engine,
        [request(f"logprob-{temperature}-{top_p}-{i}", seed=i, temperature=temperature, top_p=top_p) for i in range(8)],
    )
    for row in rows:
        want = reference_logprobs(base, row, PROMPT, temperature, top_p)
        torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), want, atol=1e-4, rtol=0)


def test_a_response_ends_with_eos_or_is_cut_at_the_length(engine):
    tokenizer = byte_tokenizer()
    rows = generate(engine, [request(f"end-{i}", seed=i, max_tokens=100) for i in range(64)])
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    cut = [row for row in rows if row["finish_reason"] == "length"]
    assert stopped and cut and len(stopped) + len(cut) == 64
    for row in stopped:
        # The end token is the learner's to train on, and has its log-prob, but is not text.
        assert row["response_ids"].index(tokenizer.eos_token_id) == len(row["response_ids"]) - 1
        assert "<|eos|>" not in row["response_text"]
    for row in cut:
        assert len(row["response_ids"]) == 100 and tokenizer.eos_token_id not in row["response_ids"]
    for row in rows:
        assert row["response_text"] == tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert len(row["response_ids"]) == len(row["engine_logprobs"]) == len(row["weight_versions"])
        assert row["generate_error"] == "" and row["engine"] == "engine-0"
        assert row["generate_start"] <= row["generate_end"]


def test_stop_strings_end_a_response_and_stay_in_it(engine):
    free = generate(engine, [request(f"free-{i}", seed=i, max_tokens=64) for i in range(8)])
    rows = generate(engine, [request(f"stop-{i}", seed=i, max_tokens=64, stop=["e", "a"]) for i in range(8)])
    stopped = [(row, whole) for row, whole in zip(rows, free, strict=True) if row["response_text"][-1:] in ("e", "a")]
    assert stopped
    for row, whole in stopped:
        assert row["finish_reason"] == "stop" and not {"e", "a"} & set(row["response_text"][:-1])
        assert row["response_ids"] == whole["response_ids"][: len(row["response_ids"])]
        assert len(row["response_ids"]) == len(row["engine_logprobs"])


@pytest.mark.parametrize(
    "prompt, words",
    [
        ([5] * (MAX_PROMPT + MAX_RESPONSE + 1), "maximum"),
        ([5, 9999], "vocab"),
        ([], "empty"),
    ],
)
def test_what_vllm_refuses_comes_back_as_failed(engine, prompt, words):
    (row,) = generate(engine, [request(f"refused-{len(prompt)}", prompt_ids=prompt)])
    assert row["finish_reason"] == "failed" and words in row["generate_error"].lower()
    assert (row["response_text"], row["response_ids"], row["engine_logprobs"]) == ("", [], [])
    (good,) = generate(engine, [request(f"after-{len(prompt)}")])
    assert good["generate_error"] == ""


def test_same_seed_same_sample_and_the_batch_does_not_matter(engine):
    alone = generate(engine, [request("alone", seed=11)])
    others = [request(f"other-{i}", seed=i, prompt_ids=[i, 7]) for i in range(30)]
    crowd = generate(engine, [*others, request("crowd", seed=11)])
    assert_same_samples(alone, crowd[-1:])
    assert generate(engine, [request("else", seed=12)])[0]["response_ids"] != alone[0]["response_ids"]


def test_more_prompt_tokens_at_once_than_a_step_reads(engine):
    """Seeded requests whose prompts were read in parts once killed the EngineCore on CPU."""
    pid = ray.get(engine.ready.remote())["pid"]
    length = MAX_PROMPT - 1  # does not divide what a step reads
    prompts = [[i, i + 1, *PROMPT * 8][:length] for i in range(2 * CPU_BATCHED_TOKENS // length)]
    rows = generate(engine, [request(f"long-{i}", seed=i, prompt_ids=p, max_tokens=4) for i, p in enumerate(prompts)])
    assert all(row["generate_error"] == "" for row in rows) and ray.get(engine.ready.remote())["pid"] == pid


def test_a_repeated_request_is_answered_once(engine):
    before = ray.get(engine.stats.remote())["generated_tokens"]
    first, second = generate(engine, [request("twice"), request("twice")])
    (later,) = generate(engine, [request("twice")])
    assert first == second == later  # generate_end too
    tokens = ray.get(engine.stats.remote())["generated_tokens"] - before
    assert tokens == len(first["response_ids"])
    (other_plan,) = generate(engine, [request("twice", plan="another attempt")])
    assert other_plan["generate_end"] > first["generate_end"] and other_plan["response_ids"] == first["response_ids"]


def test_the_gate_holds_a_request_until_its_weights_are_there(engine, base):
    new = version(engine) + 1
    early = engine.generate.remote(request("early", min_version=new))
    wait_until(lambda: ray.get(engine.stats.remote())["waiting"] == 1, "the request waits at the gate")
    (current,) = generate(engine, [request("current")])
    assert set(current["weight_versions"]) == {new - 1} and not ray.wait([early], timeout=0)[0]
    opened = time.time()
    publish(engine, base, new)
    row = ray.get(early, timeout=60)
    assert set(row["weight_versions"]) == {new} and row["generate_start"] >= opened


def long_requests(engine, plan: str, n: int) -> list:
    """Starts n long samples and returns once each has made some tokens."""
    long = [engine.generate.remote(request(f"{i}", plan=plan, seed=i, max_tokens=MAX_RESPONSE)) for i in range(n)]
    wait_until(lambda: ray.get(engine.stats.remote())["in_flight"] == n, "the long samples run")
    generate(engine, [request("probe", plan=plan, max_tokens=8)])  # batched with them, so they moved as far
    return long


def test_an_update_in_flight_marks_each_token_with_its_version(engine, base):
    old = version(engine)
    changed = perturbed(tiny_model("llama", tied=False))
    long = long_requests(engine, "in flight", 8)
    publish(engine, changed, old + 1, in_flight=True)
    rows = ray.get(long, timeout=120)
    mixed = [row for row in rows if set(row["weight_versions"]) == {old, old + 1}]
    assert mixed and all(set(row["weight_versions"]) <= {old, old + 1} for row in rows)
    for row in mixed:
        assert row["weight_versions"] == sorted(row["weight_versions"])
        # The versions are true: each part has the log-probs of its weights, the cache of the old ones being dropped.
        split = row["weight_versions"].index(old + 1)
        want = reference_logprobs(base, row, PROMPT, 1.0)[:split].tolist()
        want += reference_logprobs(changed, row, PROMPT, 1.0)[split:].tolist()
        torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), torch.tensor(want), atol=1e-4, rtol=0)
    publish(engine, base, old + 2)


def test_an_update_not_in_flight_lets_running_samples_finish(engine, base):
    old = version(engine)
    long = long_requests(engine, "finish first", 4)
    publish(engine, base, old + 1)
    assert all(set(row["weight_versions"]) == {old} for row in ray.get(long, timeout=60))


def test_an_engine_that_sleeps_takes_new_weights_and_goes_on(engine, base):
    """vLLM on CPU frees nothing, but stops and resumes its scheduler all the same."""
    old = version(engine)
    long = long_requests(engine, "before sleep", 2)
    ray.get(engine.sleep.remote())
    assert all(set(row["weight_versions"]) == {old} for row in ray.get(long, timeout=60))
    held = engine.generate.remote(request("held by sleep"))
    wait_until(lambda: ray.get(engine.stats.remote())["waiting"] == 1, "it waits at the gate")
    changed = perturbed(tiny_model("llama", tied=False))
    publish(engine, changed, old + 1)
    row = ray.get(held, timeout=60)
    assert set(row["weight_versions"]) == {old + 1}
    want = reference_logprobs(changed, row, PROMPT, 1.0)
    torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), want, atol=1e-4, rtol=0)
    publish(engine, base, old + 2)


def test_abort_ends_what_runs_and_what_waits_of_one_plan_alone(engine):
    new = version(engine) + 1
    doomed = long_requests(engine, "doomed", 3)
    doomed += [engine.generate.remote(request(f"w{i}", plan="doomed", min_version=new)) for i in range(3)]
    other = engine.generate.remote(request("other", plan="kept", max_tokens=200))
    wait_until(lambda: ray.get(engine.stats.remote())["waiting"] == 3, "three wait")
    assert ray.get(engine.abort.remote("doomed")) == 6
    for row in ray.get(doomed, timeout=30):
        assert row["finish_reason"] == "failed" and "aborted with plan doomed" in row["generate_error"]
    assert ray.get(other, timeout=60)["generate_error"] == ""
    stats = ray.get(engine.stats.remote())
    assert (stats["in_flight"], stats["waiting"]) == (0, 0)
    (late,) = generate(engine, [request("late", plan="doomed")])
    assert "aborted" in late["generate_error"]


def test_abort_of_some_samples_leaves_the_others_of_the_plan(engine):
    (first, *others) = long_requests(engine, "partly", 3)
    assert ray.get(engine.abort.remote("partly", ["0", "unknown"])) == 1
    assert "aborted" in ray.get(first, timeout=30)["generate_error"]
    assert [row["generate_error"] for row in ray.get(others, timeout=60)] == ["", ""]
    (late,) = generate(engine, [request("late", plan="partly", max_tokens=4)])
    assert late["generate_error"] == ""


def test_busy_seconds_count_time_with_requests_running(engine):
    before, begin = ray.get(engine.stats.remote()), time.monotonic()
    generate(engine, [request(f"busy-{i}", seed=i, max_tokens=100) for i in range(8)])
    busy = ray.get(engine.stats.remote())["busy_seconds"] - before["busy_seconds"]
    assert 0 < busy <= time.monotonic() - begin
    idle = ray.get(engine.stats.remote())["busy_seconds"]
    assert ray.get(engine.stats.remote())["busy_seconds"] == idle


def test_a_learner_that_dies_in_an_update_leaves_the_gate_closed_and_the_next_one_succeeds(engine, base):
    new = version(engine) + 1
    changed = list(pack(iterate_full_parameters(perturbed(tiny_model("llama"))), torch.float32, 30_000))
    frozen = long_requests(engine, "frozen", 2)
    ray.get(engine.start_update.remote(in_flight=True))
    ray.get(engine.update_bucket.remote(changed[0]))
    held = engine.generate.remote(request("held"))
    assert not ray.wait([held, *frozen], timeout=0.5)[0]
    publish(engine, base, new)
    rows = ray.get([held, *frozen], timeout=60)
    assert [set(row["weight_versions"]) for row in rows] == [{new}, {new - 1, new}, {new - 1, new}]
    for row in rows:  # not one token was made with the half of the lost update that had arrived
        want = reference_logprobs(base, row, PROMPT, 1.0)
        torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), want, atol=1e-4, rtol=0)


def test_a_failed_update_names_the_engine_and_the_next_one_succeeds(engine, base):
    new = version(engine) + 1
    wrong = tiny_model("llama", hidden=128)
    with pytest.raises(RuntimeError, match=f"weight update {new} failed: engine-0: "):
        publish(engine, wrong, new)
    publish(engine, base, new)
    (row,) = generate(engine, [request("right again")])
    want = reference_logprobs(base, row, PROMPT, 1.0)
    torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), want, atol=1e-4, rtol=0)


def test_an_engine_that_dies_comes_back_with_the_newest_weights(engine, base):
    new = version(engine) + 1
    changed = perturbed(tiny_model("llama"), seed=5)
    publish(engine, changed, new)
    long = long_requests(engine, "survivors", 4)
    first_pid = ray.get(engine.ready.remote())["pid"]
    (core,) = processes(engine)
    core.kill()
    rows = ray.get(long, timeout=120)
    assert ray.get(engine.ready.remote())["pid"] != first_pid
    for row in rows:
        assert row["generate_error"] == "" and set(row["weight_versions"]) == {new}
        want = reference_logprobs(changed, row, PROMPT, 1.0)
        torch.testing.assert_close(torch.tensor(row["engine_logprobs"]), want, atol=1e-4, rtol=0)


def test_a_killed_actor_leaves_no_process(engine):
    left = processes(engine)
    assert left
    ray.kill(engine)
    wait_until(lambda: not any(map(alive, left)), "EngineCore gone after the actor was killed")


def test_an_engine_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ray.exceptions.ActorDiedError, match=str(tmp_path / "nowhere")):
        start(tmp_path / "nowhere", "no model")


# -- NCCL: what can be checked without GPUs. The sender itself is vLLM's. ----------------------------------------------


@ray.remote
class Recorder:
    """Stands where an engine stands, since one that speaks NCCL needs a GPU; writes down what it is asked."""

    def __init__(self, name: str, workers: int):
        self.name, self.workers, self.calls = name, workers, []

    def ready(self) -> dict:
        return {"name": self.name, "node": "here", "pid": 1, "tensor_parallel_size": self.workers}

    def init_weight_transfer(self, init_info: dict) -> None:
        self.calls.append(("init", init_info))

    def start_update(self, in_flight: bool) -> None:
        self.calls.append(("start", in_flight))

    def update(self, update_info: dict) -> None:
        self.calls.append(("update", update_info))

    def finish_update(self, version: int) -> None:
        self.calls.append(("finish", version))

    def recorded(self) -> list:
        return self.calls


def is_dead(recorder) -> bool:
    try:
        ray.get(recorder.recorded.remote())
    except ray.exceptions.RayActorError:
        return True
    return False


def test_nccl_gives_each_worker_a_rank_of_its_own_and_each_engine_the_version():
    from raypipe.engines.nccl import GatedClient

    recorders = [Recorder.remote("engine-0", 2), Recorder.remote("engine-1", 1)]
    client = GatedClient(Engines(recorders))
    client.version, client.in_flight = 7, True
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 4})
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    after = [("start", True), ("update", {"names": ["w"]}), ("finish", 7)]
    # Rank 0 is the learner, 1 and 2 the workers of engine-0, 3 that of engine-1.
    assert ray.get(recorders[0].recorded.remote()) == [("init", {"rank_offset": 1, "world_size": 4}), *after]
    assert ray.get(recorders[1].recorded.remote()) == [("init", {"rank_offset": 3, "world_size": 4}), *after]


def test_nccl_an_engine_that_dies_frees_the_learner_and_is_named():
    from raypipe.engines.nccl import GatedClient

    recorders = [Recorder.remote("engine-0", 1), Recorder.remote("engine-1", 1)]
    client = GatedClient(Engines(recorders))
    aborted = []
    client.abort_broadcast = lambda: aborted.append(True)
    ray.kill(recorders[1])
    wait_until(lambda: is_dead(recorders[1]), "the actor is gone")
    with pytest.raises(RuntimeError, match="engine-1 died; over NCCL an engine cannot come back"):
        client.update_weights({})
    assert aborted == [True]


def test_nccl_sends_exactly_the_metadata_it_announces():
    from raypipe.engines.nccl import CastParameters

    model = tiny_model("qwen2", tied=True)
    source = CastParameters(model, torch.bfloat16)
    source.parameters = iterate_full_parameters(model)
    sent = list(source)
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent] == [
        (meta.name, meta.dtype, meta.shape) for meta in source.metadata()
    ]
    assert "lm_head.weight" not in dict(sent) and all(tensor.dtype == torch.bfloat16 for _, tensor in sent)
