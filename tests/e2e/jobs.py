"""The mixed traffic of the end-to-end tests: real HTTP requests of many kinds, and what each must return."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests

from dspark.demo.server import ServerProcess, stream_pieces

MODEL = "default"
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
    }
)
TIMEOUT = 600.0
LONG = (
    "Here is a list of steps that a baker follows every morning before the shop opens. First she lights the oven "
    "and waits "
    "until the stones are hot. Then she weighs the flour, the water, the salt and the yeast, and mixes them slowly "
    "in the large "
    "steel bowl. While the dough rests under a damp cloth, she prepares the trays, sweeps the floor and reads the "
    "orders that "
    "came in during the night. After an hour she shapes forty small rolls and twelve long loaves, scores each of "
    "them twice with "
    "a sharp blade, and slides them into the oven on a wooden board. When the crust is brown she takes them out, "
    "knocks on the "
    "bottom of one loaf to hear whether it sounds hollow, and sets everything on the rack by the window to cool. "
)


@dataclass
class Job:
    """One request. ``run`` sends it and returns what the client saw."""

    name: str
    run: Callable[[ServerProcess], Any]
    greedy: bool  # greedy answers must equal those of the server without speculation
    aborts: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def _post(server: ServerProcess, path: str, payload: dict[str, Any], stream: bool = False) -> requests.Response:
    response = requests.post(server.url + path, json=payload, timeout=TIMEOUT, stream=stream)
    assert response.status_code == 200, response.text
    return response


def chat(name: str, text: str, *, stream: bool, greedy: bool = True, **fields: Any) -> Job:
    """OpenAI chat completion; returns the text and the finish reason."""
    payload = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0 if greedy else 0.9}
    payload |= {"max_tokens": 40, "stream": stream} | fields

    def run(server: ServerProcess) -> Any:
        response = _post(server, "/v1/chat/completions", payload, stream)
        if not stream:
            choice = response.json()["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]
        choices = [event["choices"][0] for event in stream_pieces(response) if event["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]

    return Job(name, run, greedy)


def completion(name: str, prompt: str, *, stream: bool = False, greedy: bool = True, **fields: Any) -> Job:
    """OpenAI completion; returns the text and the finish reason."""
    payload = {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0 if greedy else 1.0,
        "max_tokens": 40,
        "stream": stream,
    } | fields

    def run(server: ServerProcess) -> Any:
        response = _post(server, "/v1/completions", payload, stream)
        if not stream:
            choice = response.json()["choices"][0]
            return choice["text"], choice["finish_reason"]
        choices = [event["choices"][0] for event in stream_pieces(response) if event["choices"]]
        return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]

    return Job(name, run, greedy)


def native(name: str, prompt: str, *, greedy: bool = True, new_tokens: int = 40, **sampling: Any) -> Job:
    """/generate; returns token ids and the finish reason."""
    params = {"temperature": 0.0 if greedy else 1.0, "max_new_tokens": new_tokens} | sampling

    def run(server: ServerProcess) -> Any:
        answer = _post(server, "/generate", {"text": prompt, "sampling_params": params}).json()
        return answer["output_ids"], answer["meta_info"]["finish_reason"]

    return Job(name, run, greedy)


def scored(name: str, prompt: str, *, new_tokens: int = 24, fields: dict[str, Any], **sampling: Any) -> Job:
    """/generate with logprobs; returns token ids and, per list of the answer, its numbers and token ids."""
    params = {"temperature": 0.0, "max_new_tokens": new_tokens} | sampling

    def run(server: ServerProcess) -> Any:
        payload = {"text": prompt, "sampling_params": params, "return_logprob": True} | fields
        answer = _post(server, "/generate", payload).json()
        lists = sorted(key for key in answer["meta_info"] if key.endswith("logprobs"))
        return answer["output_ids"], {key: answer["meta_info"][key] for key in lists}

    return Job(name, run, greedy=True)


def scored_jobs() -> list[Job]:
    """Logprobs of every kind, alone and beside what changes the logits."""
    return [
        scored("logprobs", "The capital of Italy is", fields={}),
        scored("top logprobs", LONG, fields={"top_logprobs_num": 3}),
        scored("of tokens", "The sun is", fields={"token_ids_logprob": [28, 30]}),
        scored("of the prompt", "The moon is", fields={"logprob_start_len": 0, "top_logprobs_num": 2}),
        scored("with penalties", "one two", fields={"top_logprobs_num": 1}, frequency_penalty=0.5, ignore_eos=True),
        scored("with a regex", "A number:", fields={}, regex="[0-9]{3}-[0-9]{4}"),
    ]


def aborted(name: str, prompt: str) -> Job:
    """A client that goes away after a few chunks of a long answer."""
    payload = {
        "text": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
    }

    def run(server: ServerProcess) -> Any:
        with _post(server, "/generate", payload, stream=True) as response:
            for count, _ in enumerate(response.iter_lines()):
                if count > 4:
                    break
        return "gone"

    return Job(name, run, greedy=False, aborts=True)


def mixed_traffic() -> list[Job]:
    """36 requests; prompts built on ``LONG`` share a prefix that is longer than one prefill chunk."""
    return [
        chat("chat", "What is the capital of France?", stream=False),
        chat("chat stream", "Name three fruits that are red.", stream=True),
        chat("chat stop string", "Count from one to ten in words, separated by commas.", stream=False, stop=["five"]),
        chat("chat stop stream", "List the days of the week.", stream=True, stop=["Thursday", "Friday"]),
        chat("chat sampled", "Tell me a joke.", stream=False, greedy=False, seed=11),
        chat("chat sampled top_p", "Tell me a story.", stream=True, greedy=False, top_p=0.8),
        completion("completion", "def add(a, b):\n    return"),
        completion("completion stream", "import numpy as np\n\ndef", stream=True),
        completion("completion stop", "1, 2, 3, 4,", stop=["9"]),
        completion("completion sampled", "Once upon a time", greedy=False),
        native("one token", "The sky is", new_tokens=1),
        native("two tokens", "The grass is", new_tokens=2),
        native("nine tokens", "The sea is", new_tokens=9),
        native("long prompt", LONG + "In short,"),
        native("long prompt twin", LONG + "In short,"),
        native("shared prefix", LONG + "The baker is happy because"),
        native("shared prefix sampled", LONG + "The baker is sad because", greedy=False, top_k=20),
        native("twice the long prompt", LONG + LONG + "To sum up,"),
        native("ignore eos", "Thank you and goodbye.", new_tokens=60, ignore_eos=True),
        native("min_p", "My favourite colour is", greedy=False, min_p=0.1),
        native("logit bias", "The answer is", logit_bias={"28": 3.0}),
        native("stop token", "A, B, C,", stop_token_ids=[28]),
        native("frequency penalty", "one two one two one", frequency_penalty=0.7, ignore_eos=True),
        native("presence penalty", "red, red, red,", presence_penalty=0.9, ignore_eos=True),
        native("repetition penalty", "A list of cities:\n1.", repetition_penalty=1.25, ignore_eos=True),
        # No repetition penalty beside them: without overlap the order of the host's penalties is that of a set.
        native("both penalties", LONG, frequency_penalty=0.3, presence_penalty=-0.4, new_tokens=60),
        native("minimum", "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n", min_new_tokens=30),
        native("regex", "My number is", regex=r"[0-9]{3}-[0-9]{4}:(yes|no)"),
        native("json", "<|im_start|>user\nDescribe a person.<|im_end|>\n<|im_start|>assistant\n", json_schema=PERSON),
        native("ebnf", "Is water wet?", ebnf='root ::= ("yes" | "no") ("-" [a-z]+){3} "."'),
        native("regex and penalty", "Say it:", regex="[a-z]{2,5}(-[a-z]{2,5}){9}", presence_penalty=0.8),
        native("regex sampled", "A year:", greedy=False, regex="[0-9]{4}(,[0-9]{4}){4}", top_p=0.9),
        chat("json sampled", "Describe a person.", stream=True, greedy=False, response_format={"type": "json_object"}),
        native("penalty sampled", "Bees", greedy=False, frequency_penalty=0.5, top_p=0.9, logit_bias={"30": -5.0}),
        aborted("aborted", "Write a very long poem about rivers."),
        aborted("aborted long", LONG + "Continue the list:"),
    ]


def finish_jobs() -> list[Job]:
    """Answers whose end, whatever ends them, falls on every position of a block."""
    short = "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
    count = "one, two, three, four, five, six,"
    jobs = [native(f"end at {limit}", short, new_tokens=limit) for limit in range(8, 17)]
    # A stop token two tokens in, and a limit that the same block reaches: the earlier one must win.
    jobs += [native(f"comma, limit {n}", count, new_tokens=n, stop_token_ids=[28]) for n in range(2, 9)]
    jobs += [native(f"two stops, limit {n}", count, new_tokens=n, stop=["twelve", "nine"]) for n in range(5, 16, 2)]
    jobs.append(native("stop token before stop string", count, new_tokens=24, stop=["ten"], stop_token_ids=[28]))
    return jobs
