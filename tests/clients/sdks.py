"""The openai, anthropic and litellm packages against a served tiny-glm5: usage: sdks.py URL KEY"""

import json
import sys

import anthropic
import litellm
import openai

url, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=2)
model = client.models.list().data[0].id


def tool(name, description, parameter):
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("get_weather", "Weather of a city", "city"),
    tool("get_time", "Time in a city", "city"),
    tool("calculator", "Evaluate an expression", "expression"),
    tool("lookup", "Look up a fact", "query"),
]


def user(text):
    return {"role": "user", "content": text}


def chat(messages, **options):
    return client.chat.completions.create(model=model, messages=messages, temperature=0, **options)


# An answer, whole and streamed, with and without reasoning.
question = [user("What is 37+48?")]
thinking = {"chat_template_kwargs": {"enable_thinking": True}}
message = chat(question, extra_body=thinking).choices[0].message
assert message.content == "37 + 48 = 85.", message
assert message.reasoning_content.startswith("7 + 8 = 15"), message
chunks = list(chat(question, extra_body=thinking, stream=True, stream_options={"include_usage": True}))
deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
assert "".join(delta.content or "" for delta in deltas) == message.content
assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
assert chunks[-1].usage.completion_tokens > 20 and not chunks[-1].choices

# Two steps with tools: each call is answered, and the answers are used.
messages = [user("What is the weather in Oslo?")]
for name, result, expected, following in [
    ("get_weather", "-3 degrees", "It is -3 degrees in Oslo.", "What time is it in Paris?"),
    ("get_time", "14:05", "It is 14:05 in Paris.", None),
]:
    choice = chat(messages, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    (call,) = choice.message.tool_calls
    assert call.function.name == name and list(json.loads(call.function.arguments)) == ["city"], call
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = chat(messages, tools=TOOLS).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", expected), answer
    messages.append({"role": "assistant", "content": answer.message.content})
    messages.append(user(following))
with client.chat.completions.stream(model=model, messages=[user("What is the weather in Oslo?")], tools=TOOLS, temperature=0) as stream:
    (call,) = stream.get_final_completion().choices[0].message.tool_calls
assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"}), call
forced = chat([user("Hello.")], tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
assert len(forced) >= 1 and forced[0].function.name in {entry["function"]["name"] for entry in TOOLS}, forced

# A schema, log-probabilities, several choices.
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"], "additionalProperties": False}
shape = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema, "strict": True}}
answer = chat([user("What is the capital of France?")], response_format=shape).choices[0].message.content
assert json.loads(answer)["city"] in ("Paris", "London"), answer
logprobs = chat([user("What is 2+2? Answer briefly.")], logprobs=True, top_logprobs=3).choices[0].logprobs.content
assert logprobs[0].token == "4" and logprobs[0].logprob > -0.1 and len(logprobs[0].top_logprobs) == 3, logprobs
seeded = [
    [choice.text for choice in client.completions.create(model=model, prompt="In the", n=3, seed=5, max_tokens=6, temperature=1.5).choices]
    for _ in range(2)
]
assert seeded[0] == seeded[1] and len(set(seeded[0])) > 1, seeded
echoed = client.completions.create(model=model, prompt="The capital of France is", echo=True, logprobs=1, max_tokens=1, temperature=0).choices[0]
assert echoed.text == "The capital of France is Paris" and echoed.logprobs.token_logprobs[0] is None, echoed

# Responses.
response = client.responses.create(model=model, input="What is 37+48?", reasoning={"effort": "high"}, temperature=0)
assert response.output_text == "37 + 48 = 85." and [item.type for item in response.output] == ["reasoning", "message"], response
with client.responses.stream(model=model, input="What is 37+48?", temperature=0, reasoning={"effort": "high"}) as stream:
    assert stream.get_final_response().output_text == "37 + 48 = 85."

# Errors are of the classes that programs catch.
for options, kind, param in [
    ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ({"model": "gpt-4"}, openai.NotFoundError, "model"),
    ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
]:
    try:
        client.chat.completions.create(**{"model": model, "messages": question, **options})
        raise SystemExit(f"{options} was taken")
    except kind as error:
        assert error.param == param, error
try:
    openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    raise SystemExit("a wrong key was taken")
except openai.AuthenticationError as error:
    assert error.code == "invalid_api_key"

# Anthropic.
claude = anthropic.Anthropic(base_url=url, api_key=key)
greedy = {"temperature": 0}
message = claude.messages.create(
    model=model, max_tokens=100, messages=question, thinking={"type": "enabled", "budget_tokens": 1024}, extra_body=greedy
)
assert [block.type for block in message.content] == ["thinking", "text"] and message.content[1].text == "37 + 48 = 85.", message
tools = [
    {"name": entry["function"]["name"], "description": entry["function"]["description"], "input_schema": entry["function"]["parameters"]}
    for entry in TOOLS
]
weather = [user("What is the weather in Oslo?")]
with claude.messages.stream(model=model, max_tokens=100, messages=weather, tools=tools, extra_body=greedy) as stream:
    message = stream.get_final_message()
(block,) = message.content
assert (message.stop_reason, block.type, block.name, block.input) == ("tool_use", "tool_use", "get_weather", {"city": "Oslo"}), message
weather += [
    {"role": "assistant", "content": [block.model_dump(include={"type", "id", "name", "input"})]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "-3 degrees"}]},
]
message = claude.messages.create(model=model, max_tokens=100, messages=weather, tools=tools, extra_body=greedy)
assert message.content[0].text == "It is -3 degrees in Oslo." and message.stop_reason == "end_turn", message
assert claude.messages.count_tokens(model=model, messages=question).input_tokens == 13
try:
    claude.messages.create(model=model, max_tokens=0, messages=question)
    raise SystemExit("max_tokens 0 was taken")
except anthropic.BadRequestError as error:
    assert "max_tokens" in str(error), error

# litellm, as most gateways use it.
answer = litellm.completion(
    model=f"openai/{model}", api_base=f"{url}/v1", api_key=key, messages=[user("What is 2+2? Answer briefly.")], temperature=0
)
assert answer.choices[0].message.content == "4", answer
print("ok")
