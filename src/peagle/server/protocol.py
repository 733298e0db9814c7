"""The bodies of requests. A field that is not declared here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from peagle.server.wrong_values import INTEGERS, at_most, checked_prompt, few_entries, few_parts

MAX_CHOICES = 128
# Work that is done in every step, while all others wait, has its limits.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1000
MAX_STOP_CHARACTERS = 4000  # of all stop strings of a request
MAX_LISTED = 1024  # stop_token_ids, logit_bias
MAX_METADATA = 16
MAX_MESSAGES = 2**14  # and parts of all of them
MAX_TEMPLATE_ENTRIES = 1024  # of chat_template_kwargs, whatever they are in
MAX_TOKENS = 2**20  # of /detokenize


def _few_characters(stop: list[str]) -> list[str]:
    if sum(map(len, stop)) > MAX_STOP_CHARACTERS:
        raise ValueError
    return stop


# fail_fast: the first wrong element ends it. An error for each would take seconds and gigabytes for a large list.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=INTEGERS)]], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[
    list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), AfterValidator(_few_characters)
]
PromptField = Annotated[
    Any, PlainValidator(checked_prompt, json_schema_input_type=str | TokenIds | list[str] | list[TokenIds])
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, given: Any) -> Any:
        """Of very many unknown fields the first alone: each would be an error of its own."""
        known = cls.model_fields
        if not isinstance(given, dict) or len(given) <= 2 * len(known):
            return given
        unknown = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == unknown}


class StreamOptions(Body):
    """include_obfuscation pads OpenAI's chunks to one length; here nothing is padded."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class TextFormat(Body):
    """The only response format that there is: free text."""

    type: Literal["text"]


class GenerationBody(Body):
    """What chat and plain completions have in common: OpenAI's fields, then vLLM's, then this server's own."""

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=MAX_LISTED), BeforeValidator(at_most(MAX_LISTED))] | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, lt=INTEGERS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, lt=INTEGERS)] | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: str | None = None
    # vLLM's extensions
    top_k: Annotated[int, Field(ge=-1, lt=INTEGERS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_LISTED)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=INTEGERS)] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, lt=INTEGERS)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # this server's own
    num_speculative_tokens: Annotated[int, Field(ge=0, lt=INTEGERS)] | None = Field(
        default=None, description="Draft tokens a step for this request, at most the server's; 0 decodes it plainly."
    )
    return_spec_metrics: bool | None = Field(
        default=None, description="Add each choice's draft and acceptance counts to the response, as spec_metrics."
    )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0, lt=INTEGERS)] | None = Field(
        default=None, description="At least 1; 0 with echo, for the prompt alone."
    )
    best_of: Annotated[int, Field(gt=-INTEGERS, lt=INTEGERS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1, lt=INTEGERS)] | None = None
    suffix: str | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation. The fields below `name` are in what a client got back from here or from vLLM, and
    say nothing."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: None = None
    reasoning_content: None = None


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts(MAX_MESSAGES)),
]
TemplateArguments = Annotated[dict[str, Any], BeforeValidator(few_entries(MAX_TEMPLATE_ENTRIES))]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INTEGERS)] | None = None
    # what clients send though they ask for nothing by it
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(at_most(MAX_METADATA))] | None = None
    service_tier: Literal["auto", "default"] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    verbosity: None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1, lt=INTEGERS)] | None = None
    response_format: TextFormat | None = None
    # vLLM's extensions
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or messages by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_TOKENS)]
