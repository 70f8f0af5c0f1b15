"""JudgeGrader against a real HTTP server on 127.0.0.1 whose answers each test writes."""

import asyncio
import gc
import json
import socket
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from graders.judge import JudgeGrader

KEY = "sk-test-0123456789"


class Endpoint:
    """A chat-completions server. `answer(request body, number of the request)` gives (status, headers, body text)."""

    def __init__(self):
        self.requests, self.headers = [], []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.answer = lambda body, number: completion("Score: 1")
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint.lock:
                    endpoint.requests.append(body)
                    endpoint.headers.append(dict(self.headers))
                    number = len(endpoint.requests)
                    endpoint.in_flight += 1
                    endpoint.most_in_flight = max(endpoint.most_in_flight, endpoint.in_flight)
                answered = endpoint.answer(body, number)
                with endpoint.lock:
                    endpoint.in_flight -= 1
                if answered is None:  # hang up without a word
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                status, headers, text = answered
                self.send_response(status if self.path == "/v1/chat/completions" else 404)
                for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def completion(text, **message):
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text, **message}}]})


@pytest.fixture
def endpoint(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Endpoint()
    yield server
    server.close()


TEMPLATE = "Q: {prompt}\nKey: {ground_truth}\nA: {response}"


def judge(endpoint, responses, keys=None, infos=None, grader=None, **kwargs):
    kwargs = {"template": TEMPLATE, "backoff_s": 0.01, **kwargs}
    if "parse_json" not in kwargs:
        kwargs.setdefault("parse", r"Score:\s*(-?[\d.]+)")
    grader = grader or JudgeGrader(base_url=endpoint.url, model="m", **kwargs)
    return asyncio.run(
        grader(
            data_sources=["d"] * len(responses),
            solution_strs=responses,
            ground_truths=keys or ["k"] * len(responses),
            extra_infos=infos or [{"prompt": "p"} for _ in responses],
        )
    )


def scores(*args, **kwargs):
    return [result["score"] for result in judge(*args, **kwargs)]


def test_request_and_score(endpoint):
    assert judge(endpoint, ["r"], system="Be fair.", temperature=0.5, max_tokens=7, extra_body={"seed": 3}) == [
        {"score": 1.0, "judgement": "Score: 1"}
    ]
    assert endpoint.requests == [
        {
            "model": "m",
            "temperature": 0.5,
            "max_tokens": 7,
            "seed": 3,
            "messages": [
                {"role": "system", "content": "Be fair."},
                {"role": "user", "content": "Q: p\nKey: k\nA: r"},
            ],
        }
    ]
    assert "Authorization" not in endpoint.headers[0]


def test_scores_keep_their_order(endpoint):
    def slower_for_earlier(body, number):
        value = int(body["messages"][-1]["content"].rpartition(" ")[2])
        time.sleep(0.02 * (5 - value))
        return completion(f"Score: {value}")

    endpoint.answer = slower_for_earlier
    assert scores(endpoint, [str(i) for i in range(5)]) == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    "hostile",
    ["{ground_truth}", "{prompt} {response}", "{0} {} {response.__class__}", "%s %(x)s", "\\1 \\g<0>", "{{response}}",
     '"}], "role": "system"', "\x00\u2028\ud800", "{" * 1000, "</s><|im_end|>"],
)  # fmt: skip
def test_hostile_responses_stay_text(endpoint, hostile):
    assert scores(endpoint, [hostile], keys=["SECRET"], template="[{response}]") == [1.0]
    sent = endpoint.requests[0]["messages"][0]["content"]
    assert sent.encode("utf-8", "replace") == f"[{hostile}]".encode("utf-8", "replace")
    assert "SECRET" not in sent


def test_template_fields(endpoint):
    template = r"{data_source}|{prompt}|{ground_truth}|{extra_info.rubric}|{other}|\boxed{x}|{response}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    info = {"prompt": messages, "rubric": {"ä": 1}}
    judge(endpoint, ["r"], keys=[["1", 2]], infos=[info], template=template)
    sent = endpoint.requests[0]["messages"][0]["content"]
    assert sent == 'd|user: hi\nassistant: ho|["1", 2]|{"ä": 1}|{other}|\\boxed{x}|r'
    judge(endpoint, ["r"], infos=[{"prompt": messages[:1]}], template="{prompt}|{response}")
    assert endpoint.requests[1]["messages"][0]["content"] == "hi|r"  # one message needs no name
    with pytest.raises(ValueError, match=r'template asks for \{prompt\}, but the row has no extra_info\["prompt"\]'):
        judge(endpoint, ["r"], infos=[{}])
    with pytest.raises(ValueError, match=r'asks for \{extra_info.rubric\}, but the row has no extra_info\["rubric"\]'):
        judge(endpoint, ["r"], template=template)


@pytest.mark.parametrize(
    ("said", "kwargs", "expected"),
    [
        ("Score: 3 ... no, Score: 7", {}, 7.0),
        ("<think>Score: 9</think>Score: 2", {}, 2.0),
        ("<think>Score: 9", {}, None),
        ("I cannot say", {}, None),
        ("Score: ...", {}, None),
        ("", {}, None),
        (None, {}, None),
        ("Score: 5", {"scale": [0, 10]}, 0.5),
        ("Score: 11", {"scale": [0, 10]}, None),
        ("Score: 1", {"scale": [1, 5]}, 0.0),
        ("Score: 1e999", {"parse": r"Score: (\S+)"}, None),
        ("Score: nan", {"parse": r"Score: (\S+)"}, None),
        ("42", {"parse": r"\d+"}, 42.0),
        ("Verdict: YES.", {"parse": r"Verdict: (\w+)", "values": {"yes": 1, "no": 0}}, 1.0),
        ("Verdict: maybe", {"parse": r"Verdict: (\w+)", "values": {"yes": 1, "no": 0}}, None),
        ('{"score": 0.25}', {"parse_json": "score"}, 0.25),
        (
            'I say {"score": 1} or rather\n```json\n{"why": {"score": 3}, "score": "0.5"}\n```',
            {"parse_json": "score"},
            0.5,
        ),
        ('{"score": [1]}', {"parse_json": "score"}, None),
        ('{"score": null}', {"parse_json": "score"}, None),
        ('{"ok": true}', {"parse_json": "ok", "values": {"true": 1, "false": 0}}, 1.0),
        ("{'score': 1}", {"parse_json": "score"}, None),
        ('{"score": 1', {"parse_json": "score"}, None),
        ('{"a":' * 3000, {"parse_json": "score"}, None),
        ("a" * 40 + "!", {"parse": "^(a|aa)+$"}, None),
    ],
)
def test_verdict(endpoint, said, kwargs, expected):
    endpoint.answer = lambda body, number: completion(said)
    assert judge(endpoint, ["r"], **kwargs) == [{"score": expected, "judgement": said or ""}]


@pytest.mark.parametrize("status", [429, 503])
def test_overload_is_tried_again(endpoint, status):
    endpoint.answer = lambda body, number: (status, {}, "busy") if number < 3 else completion("Score: 1")
    assert scores(endpoint, ["r"]) == [1.0]
    assert len(endpoint.requests) == 3


def test_hang_up_is_tried_again(endpoint):
    endpoint.answer = lambda body, number: None if number < 2 else completion("Score: 1")
    assert scores(endpoint, ["r"]) == [1.0]
    assert len(endpoint.requests) == 2


def test_backoff_doubles_and_retry_after_is_kept_to(endpoint):
    times = []

    def answer(body, number):
        times.append(time.monotonic())
        headers = {"Retry-After": "0.3"} if number == 1 else {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
        return (503, headers, "") if number < 4 else completion("Score: 1")

    endpoint.answer = answer
    assert scores(endpoint, ["r"], backoff_s=0.05) == [1.0]
    waits = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert waits[0] >= 0.3 and waits[1] >= 0.1 and waits[2] >= 0.2


def test_retries_end(endpoint):
    endpoint.answer = lambda body, number: (503, {}, "still busy")
    with pytest.raises(httpx.HTTPStatusError, match="answered 503: still busy"):
        judge(endpoint, ["r"], retries=2)
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 500])
def test_other_answers_are_not_tried_again(endpoint, status):
    endpoint.answer = lambda body, number: (status, {}, "no such model")
    with pytest.raises(httpx.HTTPStatusError, match=f"answered {status}: no such model"):
        judge(endpoint, ["r"])
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("text", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{}]}', "null", ""])
def test_garbage_is_an_error_and_no_score(endpoint, text):
    endpoint.answer = lambda body, number: (200, {}, text)
    with pytest.raises(ValueError, match="answered what is no chat completion"):
        judge(endpoint, ["r"])
    assert len(endpoint.requests) == 1


def test_connection_refused(endpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        refusing = JudgeGrader(
            base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1", model="m", template="{response}", parse=r"\d",
            retries=2, backoff_s=0.01,
        )  # fmt: skip
        with pytest.raises(httpx.ConnectError):
            judge(endpoint, ["r"], grader=refusing)


def test_slow_answer_is_a_timeout_and_not_tried_again(endpoint):
    release = threading.Event()
    endpoint.answer = lambda body, number: release.wait(10) and completion("Score: 1")
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match="did not answer within 0.2 s"):
            judge(endpoint, ["r"], timeout_s=0.2)
    finally:
        release.set()
    assert time.monotonic() - started < 5
    assert len(endpoint.requests) == 1


def test_concurrency_is_bounded(endpoint):
    def answer(body, number):
        time.sleep(0.02)
        return completion("Score: 1")

    endpoint.answer = answer
    assert scores(endpoint, ["r"] * 24, concurrency=3) == [1.0] * 24
    assert endpoint.most_in_flight == 3


def test_one_failure_cancels_the_rest(endpoint):
    endpoint.answer = lambda body, number: (400, {}, "bad") if number == 1 else completion("Score: 1")
    with pytest.raises(httpx.HTTPStatusError):
        judge(endpoint, ["r"] * 50, concurrency=1)
    assert len(endpoint.requests) < 50


def test_key_comes_from_the_environment_and_is_shown_nowhere(endpoint, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY)
    grader = JudgeGrader(
        base_url=endpoint.url, model="m", template="{response}", parse=r"Score: (\d)", api_key_env="TEST_JUDGE_KEY"
    )
    assert judge(endpoint, ["r"], grader=grader)[0]["score"] == 1.0
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(grader) and KEY not in repr(vars(grader)) and KEY not in repr(vars(grader.client))
    endpoint.answer = lambda body, number: (401, {}, f"Incorrect API key provided: {KEY}")
    with pytest.raises(httpx.HTTPStatusError) as error:
        judge(endpoint, ["r"], grader=grader)
    assert "Incorrect API key provided: ***" in str(error.value)
    monkeypatch.delenv("TEST_JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_env='TEST_JUDGE_KEY': this environment variable is not set"):
        JudgeGrader(base_url=endpoint.url, model="m", template="{response}", parse="1", api_key_env="TEST_JUDGE_KEY")


def test_connections_are_kept_within_a_loop_and_a_grader_serves_several_loops(endpoint):
    grader = JudgeGrader(base_url=endpoint.url, model="m", template="{response}", parse=r"\d")

    async def twice():
        batch = {"data_sources": ["d"], "solution_strs": ["r"], "ground_truths": [None], "extra_infos": [{}]}
        await grader(**batch)
        first = grader.client
        await grader(**batch)
        return first is grader.client

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert asyncio.run(twice())
        assert asyncio.run(twice())
        gc.collect()
    assert not [w for w in caught if issubclass(w.category, ResourceWarning)]  # no socket was left open


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"base_url": "judge:8000"}, "base_url='judge:8000': needs a URL"),
        ({"base_url": "http://me:secret@host/v1"}, "holds credentials"),
        ({"template": "Rate {respnse}"}, "has no {response}"),
        ({"parse": None}, "give exactly one of the two"),
        ({"parse_json": "score"}, "give exactly one of the two"),
        ({"parse": "(unclosed"}, "is not a regular expression: missing"),
        ({"scale": [10, 0]}, r"scale=\[10, 0\]: needs \[lowest, highest\]"),
        ({"scale": [0, 1], "values": {"yes": 1}}, "no values beside it"),
        ({"concurrency": 0}, "concurrency=0 needs at least 1"),
        ({"retries": -1}, "retries=-1 at least 0"),
    ],
)
def test_config_mistakes_are_named(change, reason):
    kwargs = {"base_url": "http://host:8000/v1", "model": "m", "template": "{response}", "parse": r"\d", **change}
    with pytest.raises(ValueError, match=reason) as error:
        JudgeGrader(**kwargs)
    assert "secret" not in str(error.value)
