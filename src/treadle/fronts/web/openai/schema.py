"""Shapes of the requests: fields, their types, and their descriptions in the OpenAPI document.

Strict: a number is no string, true is no number, and an unknown field is refused with the nearest known name. Only a
whole number may be written as 2.0. Messages are read by `fronts.chat_messages`, which is lenient about unknown keys.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from ...chat_messages import MAX_MESSAGES
from ...validate import MAX_N, MAX_TOP_LOGPROBS
from ..fields import (
    Documented,
    Penalty,
    RepetitionPenalty,
    Seed,
    StopString,
    StopStrings,
    StopTokenIds,
    Temperature,
    Text,
    Timeout,
    TokenCount,
    TokenIds,
    TopK,
    TopP,
    Unit,
    Whole,
    neutral_only,
    optional,
    size,
    span,
)
from ..request_shapes import Sampling, Strict, extended
from ..template_kwargs import TemplateKwargs
from .answer_fields import (
    Budget,
    Choices,
    Effort,
    FunctionCall,
    Functions,
    JsonSchema,
    OllamaFormat,
    Pattern,
    Prediction,
    Reasoning,
    ResponseFormat,
    Shown,
    StructuredOutputs,
    Think,
    Thinking,
    ToolChoiceField,
    Tools,
)
from .ignored_fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, HARMLESS, OPTIONS_HARMLESS, OPTIONS_NEUTRAL

MAX_PROMPTS = 2048
MAX_PROMPT_IDS = 2**20
UNLIMITED = (-1, -2)

Predict = Annotated[Whole, Documented({"anyOf": [{"minimum": 1, "maximum": 2**31 - 1}, {"enum": list(UNLIMITED)}]})]
ContextSize = Annotated[Whole, span(1, 2**31 - 1)]
TopLogprobs = Annotated[Whole, span(0, MAX_TOP_LOGPROBS)]
Messages = Annotated[
    Any,
    WithJsonSchema({"type": "array", "items": {}, "minItems": 1, "maxItems": MAX_MESSAGES}),
]
Prompts = Annotated[list[Text], Field(fail_fast=True), size(minItems=1, maxItems=MAX_PROMPTS)]
PromptIds = Annotated[TokenIds, size(minItems=1, maxItems=MAX_PROMPT_IDS)]
PromptLists = Annotated[list[PromptIds], Field(fail_fast=True), size(minItems=1, maxItems=MAX_PROMPTS)]


class StreamOptions(Strict):
    """Ignored without `stream: true`."""

    include_usage: bool | None = optional("End the stream with a chunk that holds the usage.")
    include_obfuscation: Any = neutral_only("Only false: this server adds no padding.", False)
    continuous_usage_stats: bool | None = optional("With `include_usage`: each chunk has the tokens so far.")


class UsageFields(Strict):
    """OpenRouter's object. A whole answer has its usage in any case."""

    include: bool | None = optional("True: a stream ends with a chunk that holds the usage.")


class OptionFields(Strict):
    """Ollama's names for sampling. A field of the request itself wins over its namesake here."""

    temperature: Temperature | None = optional("As `temperature`.")
    top_p: TopP | None = optional("As `top_p`.")
    top_k: TopK | None = optional("As `top_k`.")
    min_p: Unit | None = optional("As `min_p`.")
    repeat_penalty: RepetitionPenalty | None = optional("As `repetition_penalty`.")
    repeat_last_n: Whole | None = optional("As `repeat_last_n`.")
    presence_penalty: Penalty | None = optional("As `presence_penalty`.")
    frequency_penalty: Penalty | None = optional("As `frequency_penalty`.")
    seed: Seed | None = optional("As `seed`.")
    stop: StopString | StopStrings | None = optional("As `stop`.")
    num_predict: Predict | None = optional("As `max_tokens`; -1 and -2 are no limit.")
    num_ctx: ContextSize | None = optional("As `num_ctx`.")


class Generate(Sampling):
    """Fields that chat and completions share."""

    model: str | None = optional("The served model's name; left out, it is the served model.")
    stream: bool | None = optional("Answer with server-sent events while the text is generated.")
    stream_options: StreamOptions | None = optional("What a stream adds; ignored without `stream: true`.")
    usage: UsageFields | None = optional("OpenRouter's form of `stream_options.include_usage`: `include`.")
    max_tokens: TokenCount | None = optional(
        "The most tokens to generate; never more than the context and the server's cap leave: the default."
    )
    n: Annotated[Whole, span(1, MAX_N)] | None = optional(
        "How many choices; times the prompts, no more than the server has places. Default: 1."
    )
    stop_token_ids: StopTokenIds | None = optional("Token ids that end the answer; they are not shown.")
    skip_special_tokens: bool | None = optional("False shows special tokens in the text.")
    return_token_ids: bool | None = optional("True adds `token_ids` to every choice.")
    timeout: Timeout | None = optional(
        "The most seconds from the request's arrival to the end of its answer, which is cut then (`stop_reason`)."
    )
    response_format: ResponseFormat = optional("The form of the answer: text, any JSON object, or JSON of a schema.")
    structured_outputs: StructuredOutputs = optional(
        "vLLM's form of it: one of `json` (a schema), `regex`, `choice`, `grammar` (Lark or GBNF), `json_object`, "
        "`structural_tag`."
    )
    guided_json: JsonSchema = optional("As `json` in `structured_outputs`.")
    guided_regex: Pattern = optional("As `regex` in `structured_outputs`.")
    guided_choice: Choices = optional("As `choice` in `structured_outputs`.")
    guided_grammar: Pattern = optional("As `grammar` in `structured_outputs`.")
    json_schema: JsonSchema = optional("llama.cpp's name of `guided_json`.")
    format: OllamaFormat = optional('Ollama\'s name of it: a schema, or "json" for any object.')
    options: OptionFields | None = None
    num_ctx: ContextSize | None = optional("Ollama's context size: refused above the served context, else not used.")
    num_predict: Predict | None = optional("Ollama's name of `max_tokens`; -1 and -2 are no limit.")
    n_predict: Predict | None = optional("llama.cpp's name of `max_tokens`; -1 and -2 are no limit.")
    max_new_tokens: TokenCount | None = optional("TGI's name of `max_tokens`.")
    repeat_penalty: RepetitionPenalty | None = optional("Ollama's and llama.cpp's name of `repetition_penalty`.")
    repeat_last_n: Whole | None = optional(
        "Ollama's and llama.cpp's number of tokens that penalties look at, here all of them: with a penalty, only -1."
    )


class ChatFields(Generate):
    """Body of a chat request."""

    messages: Messages = Field(description="The conversation, oldest message first.")
    max_completion_tokens: TokenCount | None = optional("The same as `max_tokens`; of both, the smaller counts.")
    logprobs: bool | None = optional("True adds the log-probabilities of the answer's tokens.")
    top_logprobs: TopLogprobs | None = optional(
        "How many likely tokens to list with each token; above 0 it asks for `logprobs` too, unless those are false."
    )
    add_generation_prompt: bool | None = optional("False leaves the assistant's turn unopened. Default: true.")
    continue_final_message: bool | None = optional(
        "True: the answer continues the last message, which is left open. Not with `add_generation_prompt: true`."
    )
    enable_thinking: bool | None = optional("Handed to the model's template, as in `chat_template_kwargs`.")
    prediction: Prediction = optional("Text that the answer is expected to repeat, such as a file to edit: drafts.")
    tools: Tools = optional("Functions that the model may call.")
    tool_choice: ToolChoiceField = optional(
        '"auto" (the default), "none", "required", one function, or allowed tools. All but "none" are enforced.'
    )
    parallel_tool_calls: bool | None = optional("False: at most one call in an answer. Default: true.")
    functions: Functions = optional("OpenAI's older form of `tools`; the answer has `function_call`.")
    function_call: FunctionCall = optional("OpenAI's older form of `tool_choice`.")
    reasoning_effort: Effort = optional('"none" turns reasoning off; other values are handed to the model\'s template.')
    reasoning: Reasoning = optional("OpenRouter's object: `effort`, `max_tokens`, `enabled`, `exclude`.")
    thinking: Thinking = optional("Anthropic's object: `type`, `budget_tokens`.")
    think: Think = optional("Ollama's switch: true, false, or an effort.")
    include_reasoning: Shown = optional("False leaves the reasoning out of the answer.")
    thinking_token_budget: Budget = optional("The most tokens of reasoning, which is then closed; -1 is no limit.")
    thinking_budget: Budget = optional("Another name of `thinking_token_budget`.")
    thinking_budget_tokens: Budget = optional("Another name of `thinking_token_budget`.")
    reasoning_budget: Budget = optional("Another name of `thinking_token_budget`.")
    chat_template_kwargs: TemplateKwargs | None = optional("Plain values for the model's template, by its names.")


class CompletionFields(Generate):
    """Body of a completions request."""

    prompt: Text | Prompts | PromptIds | PromptLists = Field(
        description="A string, strings, token ids, or lists of token ids."
    )
    max_tokens: Annotated[Whole, span(0, 2**31 - 1)] | None = optional(
        "The most tokens to generate; 0 computes the prompt alone. Never more than the context and the server's cap "
        "leave, which is also the default."
    )
    max_new_tokens: Annotated[Whole, span(0, 2**31 - 1)] | None = optional("TGI's name of `max_tokens`.")
    logprobs: TopLogprobs | None = optional(
        "Log-probabilities of the answer's tokens, and of so many likely ones each."
    )
    echo: bool | None = optional("True repeats the prompt before the answer, with its log-probabilities.")
    add_special_tokens: bool | None = optional("False tokenizes the prompt without BOS and the like.")


class TokenizeTextFields(Strict):
    """Body of a request for the tokens of a text."""

    prompt: str = Field(description="A text; it may be empty.")
    model: str | None = optional("The served model's name; left out, it is the served model.")
    add_special_tokens: bool | None = optional("False tokenizes the prompt without BOS and the like.")
    return_token_strs: bool | None = optional("True adds each token as the vocabulary spells it.")


class TokenizeChatFields(Strict):
    """Fields of a request for the tokens of a chat, beyond those of the chat's own request."""

    add_special_tokens: Any = neutral_only("Only false: the model's template writes them.", False)
    return_token_strs: bool | None = optional("True adds each token as the vocabulary spells it.")
    mm_processor_kwargs: Any = neutral_only("Accepted only at null.")


class DetokenizeFields(Strict):
    """Body of a request for the text of token ids."""

    tokens: Annotated[TokenIds, size(maxItems=MAX_PROMPT_IDS)] = Field(description="Token ids.")
    model: str | None = optional("The served model's name; left out, it is the served model.")


Options: type[OptionFields] = extended("Options", OptionFields, OPTIONS_NEUTRAL, OPTIONS_HARMLESS)
OPTIONS: Any = (Options | None, optional("Ollama's `options`: sampling by its names."))
ChatRequest: type[ChatFields] = extended("ChatRequest", ChatFields, CHAT_NEUTRAL, HARMLESS, options=OPTIONS)
CompletionRequest: type[CompletionFields] = extended(
    "CompletionRequest", CompletionFields, COMPLETION_NEUTRAL, HARMLESS, options=OPTIONS
)
