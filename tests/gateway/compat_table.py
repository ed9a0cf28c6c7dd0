"""What is held against each client, and the page that says how it went."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"

CLIENTS = {"python": "`openai` (Python)", "node": "`openai` (Node)", "pydantic_ai": "`pydantic-ai`"}

WORKS, REFUSED, NOT_THERE = "works", "refused", ""

FEATURES = {
    "Chat completions": {
        "chat": "an answer, whole",
        "chat_stream": "an answer, streamed",
        "chat_usage": "`stream_options.include_usage`; a repeated prompt shows in `cached_tokens`",
        "chat_n": "`n` answers with `seed`, whole and streamed",
        "chat_stop": "`stop`, `max_completion_tokens`",
        "chat_logprobs": "`logprobs`, `top_logprobs`, whole and streamed",
        "chat_schema": "`response_format` with a JSON schema",
        "chat_json": "`response_format` of `json_object`",
        "chat_tools": "tools: `required` and by name",
        "chat_tool_stream": "tools: calls as deltas of a stream",
        "chat_tool_loop": "tools: a call's result goes back, the model goes on",
        "chat_images": "images as data URLs, for a model that sees",
        "chat_failover": "the node is killed in mid-stream: the answer is the same one",
    },
    "Completions": {
        "text": "a text gone on with, whole and streamed",
        "text_many": "several prompts, token ids, `n`",
        "text_echo": "`echo`",
        "text_logprobs": "`logprobs` in the old shape",
    },
    "Responses": {
        "response": "a response, whole and streamed",
        "response_previous": "`previous_response_id`",
        "response_background": "`background`, then its stream with `starting_after`; `cancel`",
        "response_tools": "function tools, and their results",
        "response_schema": "`text.format` with a JSON schema",
        "response_forgotten": "`delete`, `store: false`",
        "response_failover": "the node is killed in mid-stream: the response is the same one",
    },
    "Other": {
        "models": "`models.list`, `models.retrieve`",
        "errors": "400 with `param`, 404, 413 and `context_length_exceeded` as the client's own exceptions",
    },
    "Refused, and why": {
        "no_logit_bias": "`logit_bias`, `presence_penalty`, `frequency_penalty`: there is `repetition_penalty` instead",
        "no_audio": "audio in and out, `modalities`: no model here hears or speaks",
        "no_web": "images and files by URL: the gateway fetches nothing from elsewhere",
        "no_suffix": "`suffix`, `best_of`, `echo` with `logprobs`: the models write on; a cached prompt has none",
        "no_hosted_tools": "hosted tools (`web_search`, ...), `truncation: auto`: there are only models here",
        "no_embeddings": "`embeddings`: the models answer in words",
    },
}

HEAD = """# Which clients do what

Made by `KVFERRY_WRITE_COMPAT=1 pytest -m slow tests/gateway/test_compat.py` from a run against two real nodes and a
gateway (for images, a node whose model sees); the same test fails when a run says something else than this page.
*Works*: the answer was right, not only there. *Refused*: the request ends with a 400 that says why. Where nothing
stands, the client has no such thing, or no way of its own for it.

"""


NOT_RUN = "not run"


def rendered(outcomes: dict[tuple[str, str], str], versions: dict[str, str]) -> str:
    """The page. ``outcomes``: by feature and client; what is not among them stays as the page has it."""
    known = read() | outcomes
    names = " | ".join(f"{name} {versions[client]}" for client, name in CLIENTS.items())
    lines = [HEAD + f"| | {names} |", "| --- |" + " --- |" * len(CLIENTS)]
    for section, features in FEATURES.items():
        lines.append(f"| **{section}** |" + " |" * len(CLIENTS))
        for key, title in features.items():
            told = " | ".join(known.get((key, client), NOT_RUN) for client in CLIENTS)
            lines.append(f"| {title} | {told} |")
    return "\n".join(lines) + "\n"


def read() -> dict[tuple[str, str], str]:
    """The cells of the page as it is."""
    keys = {title: key for features in FEATURES.values() for key, title in features.items()}
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines()] if PAGE.exists() else []
    return {
        (keys[title.strip()], client): cell.strip()
        for title, *cells in rows
        if title.strip() in keys
        for client, cell in zip(CLIENTS, cells, strict=True)
    }
