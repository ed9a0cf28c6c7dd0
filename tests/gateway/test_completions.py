"""The completions that came before chat: a prompt is gone on with as it is."""

from __future__ import annotations

import openai
import pytest

PROMPT = "The river Rhine flows through"


def go_on(client, **fields):
    return client.completions.create(
        **({"model": "any", "prompt": PROMPT, "max_tokens": 12, "temperature": 0} | fields)
    )


def test_a_text_is_gone_on_with(client):
    answer = go_on(client)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert choice.text
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens < 12, "no template stands around the prompt"


def test_it_is_not_what_a_chat_says(client):
    chat = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": PROMPT}], max_tokens=12, temperature=0
    )
    assert go_on(client).choices[0].text != chat.choices[0].message.content


def test_a_stream_says_the_same_piece_by_piece(client):
    whole = go_on(client).choices[0].text
    chunks = list(go_on(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_an_answer_goes_on_where_the_last_one_ended_and_is_not_computed_again(client):
    first = go_on(client, prompt=PROMPT * 8, max_tokens=40)
    more = go_on(client, prompt=PROMPT * 8 + first.choices[0].text)
    assert more.usage.prompt_tokens_details.cached_tokens > 0.8 * more.usage.prompt_tokens


def test_prompts_come_several_as_text_or_tokens_each_with_n_answers(client):
    alone = [go_on(client, prompt=prompt).choices[0].text for prompt in ("One", "Two")]
    assert [choice.text for choice in go_on(client, prompt=["One", "Two"]).choices] == alone
    many = go_on(client, prompt=["One", "Two"], n=2, temperature=0.9, seed=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    other = go_on(client, prompt="Two", temperature=0.9, seed=4)
    assert many.choices[3].text == other.choices[0].text
    texts = ["", "", "", ""]
    for chunk in go_on(client, prompt=["One", "Two"], n=2, temperature=0.9, seed=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in many.choices]
    ids = go_on(client, prompt=[[504, 216, 33], [504]], max_tokens=3)
    assert [choice.text for choice in ids.choices] == [
        go_on(client, prompt=prompt, max_tokens=3).choices[0].text for prompt in ([504, 216, 33], [504])
    ]


def test_echo_tells_the_prompt_first(client):
    text = go_on(client).choices[0].text
    assert go_on(client, echo=True).choices[0].text == PROMPT + text
    chunks = go_on(client, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text


def test_log_probabilities_have_the_old_shape(client):
    choice = go_on(client, logprobs=2, max_tokens=5).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == [sum(map(len, told.tokens[:number])) for number in range(5)]
    assert all(len(others) == 2 for others in told.top_logprobs)
    assert all(
        logprob == max(others.values()) for logprob, others in zip(told.token_logprobs, told.top_logprobs, strict=True)
    )
    streamed = [chunk.choices[0].logprobs for chunk in go_on(client, logprobs=2, max_tokens=5, stream=True)]
    assert [offset for one in streamed if one for offset in one.text_offset] == told.text_offset


def test_a_stop_string_ends_it_and_a_seed_makes_it_repeat(client):
    text = go_on(client, temperature=0.8, seed=11).choices[0].text
    assert go_on(client, temperature=0.8, seed=11).choices[0].text == text
    stop = text.split()[2]
    answer = go_on(client, temperature=0.8, seed=11, stop=[stop]).choices[0]
    assert (answer.finish_reason, stop in answer.text) == ("stop", False)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"suffix": " and so on"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**7]}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, fields, parameter):
    with pytest.raises(openai.BadRequestError) as caught:
        go_on(client, **fields)
    assert caught.value.param == parameter
