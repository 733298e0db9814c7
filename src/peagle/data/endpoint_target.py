"""A target that a server answers for: tokenizer and chat template are read here, its weights are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import httpx

from peagle.client.server_facts import ASK_SECONDS, key_headers, read_server, root_url
from peagle.data.chat_format import ChatFormat
from peagle.data.completions import AnswerTokens
from peagle.data.endpoint_engine import EndpointEngine
from peagle.data.endpoint_retries import EndpointSettings
from peagle.data.generate import GeneratingTarget
from peagle.data.job import GenerateJob
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError
from peagle.target.text import read_target_text

# Words that tokenizers of different models split differently.
TELLING_TEXT = "Straße 12345,678\n\tdef f(x): return x**2  # 你好, мир 🙂 unbelievably"


def open_endpoint(
    job: GenerateJob,
    target: str,
    settings: EndpointSettings,
    concurrency: int,
    max_model_len: int | None,
    say: Callable[[str], None],
) -> tuple[GeneratingTarget, EndpointEngine]:
    """Read the target's text side, and make sure that the server can answer for it.

    Args:
        settings: an empty model takes the first that the server lists.
        max_model_len: longest sequence; None for the server's, or the target's where the server does not say.

    Returns: what `generate` takes, and its engine, which the caller closes.

    Raises:
        InputError: no tokenizer; the server is down, has another tokenizer or takes no token ids.
    """
    settings = replace(settings, url=root_url(settings.url))
    text = read_target_text(target)
    if text.tokenizer is None:
        raise InputError(f"{target}: no tokenizer could be loaded, and prompts for an endpoint need one")
    chat = ChatFormat(text.tokenizer, sorted(text.eos_token_ids), job.template_kwargs)
    facts = read_server(settings.url, settings.api_key)
    settings = replace(settings, model=settings.model or facts.model)
    longest = min(length for length in (max_model_len, facts.max_model_len, text.facts.max_model_len or None) if length)
    check_tokenizer(settings, chat)
    answer = AnswerTokens(text.tokenizer, text.facts.vocab_size, text.eos_token_ids, chat.end_of_answer_id)
    engine = EndpointEngine(settings, answer, job.answers.loop_limit)
    try:
        engine.probe(chat.first_turn("Hello"), probe_params(job, chat))
    except BaseException:
        engine.close()
        raise
    how = "it tells token ids" if engine.gives_token_ids else "it tells no token ids: its texts are tokenised anew"
    say(f"endpoint {settings.url}: {settings.model} answers for {target}; {how}")
    served_by = {"model": settings.model, "version": facts.version, "token_ids": engine.gives_token_ids}
    generating = GeneratingTarget(
        engine, text.tokenizer, target, text.facts.vocab_size, longest, text.eos_token_ids, concurrency, served_by
    )
    return generating, engine


def probe_params(job: GenerateJob, chat: ChatFormat) -> SamplingParams:
    """One token, sampled with every parameter that the job will send."""
    answers = job.answers
    stops = [chat.end_of_user_id] if job.self_prompts and chat.end_of_user_id is not None else None
    return SamplingParams(
        max_tokens=1,
        temperature=max(temperature for temperature, _ in answers.temperatures),
        top_p=answers.top_p,
        top_k=answers.top_k,
        seed=answers.seed,
        stop_token_ids=stops,
    )


def check_tokenizer(settings: EndpointSettings, chat: ChatFormat) -> None:
    """Compare tokenizers through vLLM's /tokenize, where the server has that.

    Raises:
        InputError: the server splits a text into other tokens.
    """
    probe = str(chat.tokenizer.decode(chat.first_turn(TELLING_TEXT), clean_up_tokenization_spaces=False))
    body = {"model": settings.model, "prompt": probe, "add_special_tokens": False}
    headers = key_headers(settings.api_key)
    try:
        response = httpx.post(
            f"{settings.url}/tokenize", json=body, headers=headers, timeout=ASK_SECONDS, trust_env=False
        )
        tokens = response.json()["tokens"] if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return
    ours = chat.encode(probe)
    if isinstance(tokens, list) and tokens and tokens != ours:
        raise InputError(
            f"endpoint {settings.url}: {settings.model} splits a text into {len(tokens)} tokens that are not the "
            f"target's {len(ours)}; expected a server of the target itself, or of one with its tokenizer"
        )
