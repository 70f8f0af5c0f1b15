r"""An LLM as judge, over any OpenAI-compatible endpoint (vLLM, SGLang, TGI, hosted ones).

In: a response, with the prompt in `extra_info["prompt"]`. Out: the number that the judge wrote, or an abstention where
it wrote none. `judgement`, the judge's text, is logged with each score.

    graders:
      - path: graders.judge:JudgeGrader
        kwargs:
          base_url: http://judge:8000/v1
          model: Qwen/Qwen3-32B
          template: |
            Question: {prompt}
            Reference answer: {ground_truth}
            <candidate>{response}</candidate>
            Rate the candidate from 0 to 10. End with "Score: N".
          parse: 'Score:\s*(\d+)'
          scale: [0, 10]
          api_key_env: JUDGE_API_KEY

The design decision: what a model wrote is data. The template is filled in one pass of literal replacement, so that
braces or placeholders in a response stay text, and the last match of `parse` after the judge's own thinking counts.

Connection errors and the answers 429 and 503 are tried again with exponential backoff, nothing else is. How many
requests are made at a time and in a second is set for a whole run (`grade.async_concurrency`, `grade.async_rate`).
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import regex

from graders.judge_verdict import Verdict

FIELDS = ("prompt", "response", "ground_truth", "data_source")
PLACEHOLDER = regex.compile(r"\{(" + "|".join(FIELDS) + r"|extra_info\.\w+)\}")
TRY_AGAIN = (429, 503)
MAX_WAIT_S = 60.0


class JudgeGrader:
    """Scores responses by asking a model. Calls are coroutines: `await JudgeGrader(...)(...)`.

    Args:
        base_url: the endpoint up to and with `/v1`.
        model: the model's name there.
        template: the user message, with {prompt}, {response}, {ground_truth}, {data_source} and {extra_info.KEY}.
        parse: a regular expression; the first group of its last match (or all of it) is the verdict.
        parse_json: instead of `parse`: the key of the verdict in the last JSON object that the judge wrote.
        values: scores of verdicts that are words, in any case, such as {yes: 1, no: 0}; others abstain.
        scale: [lowest, highest] verdict, mapped to 0..1; a verdict outside abstains. None: the number is the score.
        system: system message; empty: none.
        temperature, max_tokens: sampling of the judge.
        extra_body: further fields of the request, such as {chat_template_kwargs: {enable_thinking: false}}.
        api_key_env: name of the environment variable that holds the key; empty: none is sent. The key itself is read
            with each request and kept nowhere.
        timeout_s: seconds for one request.
        concurrency: requests of one call in flight.
        retries, backoff_s: how often a request is repeated, and the seconds before the first repetition, doubled each
            time; a server's Retry-After is kept to.

    Raises:
        ValueError: an option that cannot work, named; when called: a row that lacks what the template asks for.
        httpx.TransportError, httpx.HTTPStatusError: the endpoint cannot be reached, or refuses.
        TimeoutError: it is too slow.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        template: str,
        parse: str | None = None,
        parse_json: str | None = None,
        values: Mapping[str, float] | None = None,
        scale: Sequence[float] | None = None,
        system: str = "",
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra_body: Mapping[str, Any] | None = None,
        api_key_env: str = "",
        timeout_s: float = 60.0,
        concurrency: int = 32,
        retries: int = 4,
        backoff_s: float = 0.5,
    ) -> None:
        self.url = _checked_url(base_url) + "/chat/completions"
        self.body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(extra_body or {})}
        if "{response}" not in template:
            raise ValueError(f"template={template!r} has no {{response}}: the judge would not see what it judges")
        self.template = template
        self.system = system
        self.verdict = Verdict(parse, parse_json, values, scale)
        if api_key_env and not os.environ.get(api_key_env):
            raise ValueError(f"api_key_env={api_key_env!r}: this environment variable is not set; export it")
        self.api_key_env = api_key_env
        self.timeout_s = timeout_s
        if concurrency < 1 or retries < 0:
            raise ValueError(f"concurrency={concurrency} needs at least 1, and retries={retries} at least 0")
        self.concurrency = concurrency
        self.retries = retries
        self.backoff_s = backoff_s
        self.loop: asyncio.AbstractEventLoop | None = None
        self.clients: AsyncGenerator[httpx.AsyncClient, None] | None = None
        self.client: httpx.AsyncClient | None = None

    async def __call__(
        self,
        *,
        data_sources: Sequence[str],
        solution_strs: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any]],
    ) -> list[dict[str, Any]]:
        samples = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        messages = [self._messages(*sample) for sample in samples]
        client = await self._client_of_loop()
        permits = asyncio.Semaphore(self.concurrency)

        async def judge(conversation: list[dict[str, str]]) -> dict[str, Any]:
            async with permits:
                text = await self._ask(client, conversation)
            return {"score": self.verdict.score(text), "judgement": text}

        try:
            async with asyncio.TaskGroup() as group:  # a failure cancels the others
                tasks = [group.create_task(judge(conversation)) for conversation in messages]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _messages(
        self, source: str, response: str | None, key: Any, info: dict[str, Any] | None
    ) -> list[dict[str, str]]:
        row = {
            "prompt": (info or {}).get("prompt"),
            "response": response or "",
            "ground_truth": key,
            "data_source": source,
        }

        def text_of(match: regex.Match[str]) -> str:
            name = match[1]
            value = (info or {}).get(name.removeprefix("extra_info.")) if "." in name else row[name]
            if value is None:
                where = f'extra_info["{name.rpartition(".")[2]}"]' if name != "ground_truth" else name
                raise ValueError(f"the template asks for {match[0]}, but the row has no {where}")
            return _as_text(value)

        user = {"role": "user", "content": PLACEHOLDER.sub(text_of, self.template)}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]

    async def _client_of_loop(self) -> httpx.AsyncClient:
        """One client, and so one pool of connections, for each event loop."""
        loop = asyncio.get_running_loop()
        if self.client is None or self.loop is not loop:
            self.loop, self.clients = loop, self._open_client()
            self.client = await anext(self.clients)
        return self.client

    async def _open_client(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        # A loop closes the generators that were begun in it before it ends, and so the client in time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits) as client:
            yield client

    async def _ask(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        """The judge's text. The request is repeated while the endpoint is out of reach or overloaded."""
        attempt = 0
        while True:
            wait = self.backoff_s * 2**attempt
            last = attempt == self.retries
            try:
                answer = await self._post(client, messages)
            except httpx.TimeoutException as error:
                if last or not isinstance(error, httpx.ConnectTimeout):
                    raise TimeoutError(f"{self.url} did not answer within {self.timeout_s:g} s") from error
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                if last:
                    raise
            else:
                if last or answer.status_code not in TRY_AGAIN:
                    return self._content(answer)
                wait = max(wait, _retry_after(answer))
            await asyncio.sleep(min(wait, MAX_WAIT_S))
            attempt += 1

    async def _post(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> httpx.Response:
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await client.post(self.url, json={**self.body, "messages": messages}, headers=headers)

    def _content(self, answer: httpx.Response) -> str:
        if not answer.is_success:
            said = _without_key(answer.text[:500], self.api_key_env)
            raise httpx.HTTPStatusError(
                f"{self.url} answered {answer.status_code}: {said}", request=answer.request, response=answer
            )
        try:
            return answer.json()["choices"][0]["message"]["content"] or ""
        except (ValueError, KeyError, IndexError, TypeError):
            said = _without_key(answer.text[:500], self.api_key_env)
            raise ValueError(f"{self.url} answered what is no chat completion: {said}") from None


def _checked_url(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url={base_url!r}: needs a URL such as http://host:8000/v1")
    if parts.username or parts.password or parts.query:
        raise ValueError("base_url holds credentials, which would be logged: take them out and use api_key_env")
    return base_url.rstrip("/").removesuffix("/chat/completions")


def _as_text(value: Any) -> str:
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        if len(value) == 1:
            value = value[0]["content"]
        else:
            value = "\n".join(f"{message['role']}: {message['content']}" for message in value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be sent


def _retry_after(answer: httpx.Response) -> float:
    try:
        return float(answer.headers.get("Retry-After", 0.0))
    except ValueError:  # a date
        return 0.0


def _without_key(text: str, api_key_env: str) -> str:
    key = os.environ.get(api_key_env, "") if api_key_env else ""
    return text.replace(key, "***") if key else text
