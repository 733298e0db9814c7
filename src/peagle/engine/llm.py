"""The offline interface, vLLM's: `LLM(model, speculative_config=...).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.engine.chat import template_message, template_takes_parts
from peagle.engine.engine import Engine
from peagle.engine.loading import load_engine
from peagle.engine.outputs import CompletionOutput, RequestOutput
from peagle.engine.request import Request
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import EngineStats, SpecMetrics
from peagle.errors import InputError
from peagle.target.model import Target

Prompt = str | Mapping[str, Any]  # text, {"prompt": text} or {"prompt_token_ids": [...]}
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that answers batches of prompts.

    model: a local folder, Hub id or GGUF file (or a loaded Target). speculative_config: SpeculativeConfig, or its JSON
    as text or mapping; None decodes plainly. Further arguments are those of EngineConfig. Raises InputError.
    """

    def __init__(
        self,
        model: str | Target,
        speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None = None,
        dtype: str = "auto",
        device: str | torch.device | None = None,
        **engine_args: Any,
    ) -> None:
        try:
            config = EngineConfig(**engine_args)
        except TypeError as error:
            raise InputError(f"LLM: {error}") from error
        self.engine: Engine = load_engine(model, speculative_config, dtype, device, config)
        self.target: Target = self.engine.target
        self._takes_parts = template_takes_parts(self.target.tokenizer)
        self._count = 0

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def get_tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise InputError(f"prompt: {self.target.name_or_path} has no tokenizer, expected prompt_token_ids")
        return self.target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, in their order. All are checked before the first is run."""
        if not isinstance(prompts, (str, Mapping, Sequence)):
            raise InputError(f"prompts: got {prompts!r}, expected one prompt or a list of them")
        several = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        texts, ids = [], []
        for prompt in several:
            text, token_ids = self._encode(prompt)
            texts.append(text)
            ids.append(token_ids)
        return self._run(texts, ids, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, by the model's own chat template."""
        tokenizer = self.get_tokenizer()
        if not _is_list(messages) or not messages:
            raise InputError(f"messages: got {messages!r}, expected a list of at least one message")
        several: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        if wrong := [one for one in several if not one or not _is_list(one)]:
            raise InputError(f"messages: got {wrong[0]!r} in it, expected messages, or lists of messages")
        texts = [self._render(conversation) for conversation in several]
        # the template writes the special tokens itself
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        return self._run(texts, ids, sampling_params, use_tqdm)

    def _render(self, conversation: Messages) -> str:
        """A conversation by the chat template, up to where the answer begins."""
        messages = [template_message(message, self._takes_parts) for message in conversation]
        try:
            return str(self.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # templates raise whatever they like, for roles they do not know for example
            raise InputError(f"messages: the chat template refuses them ({error})") from error

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if isinstance(ids := prompt.get("prompt_token_ids"), Iterable):
                return prompt.get("prompt"), list(ids)
            if not isinstance(prompt.get("prompt"), str):
                raise InputError(f"prompt: got {dict(prompt)!r}, expected prompt or prompt_token_ids in it")
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise InputError(f"prompt: got {prompt!r}, expected text or a mapping with prompt_token_ids")
        return prompt, list(self.get_tokenizer()(prompt).input_ids)

    def _run(
        self,
        texts: Sequence[str | None],
        ids: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(ids)
        else:
            if not isinstance(sampling_params, Iterable):
                raise InputError(f"sampling_params: got {sampling_params!r}, expected SamplingParams, one or several")
            params = list(sampling_params)
            if wrong := [p for p in params if not isinstance(p, SamplingParams)]:
                raise InputError(f"sampling_params: got {wrong[0]!r}, expected SamplingParams, one or several")
            if len(params) != len(ids):
                raise InputError(f"sampling_params: got {len(params)}, expected one or as many as prompts ({len(ids)})")
        groups: list[list[Request]] = []
        try:
            for token_ids, p in zip(ids, params, strict=True):
                groups.append([])
                for i, own in enumerate(p.completions()):
                    name = f"{self._count}" if p.n == 1 else f"{self._count}-{i}"
                    groups[-1].append(self.engine.add_request(name, token_ids, own))
                self._count += 1
            self._finish_all(sum(map(len, groups)), use_tqdm)
        except BaseException:  # an interrupt too: nothing of this call may run in the next
            for group in groups:
                for request in group:
                    self.engine.abort(request.request_id)
            raise
        first = self._count - len(groups)
        return [
            self._output(f"{first + i}", group, text) for i, (group, text) in enumerate(zip(groups, texts, strict=True))
        ]

    def _finish_all(self, total: int, use_tqdm: bool) -> None:
        tokens = 0
        with tqdm(total=total, desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.has_unfinished:
                outputs = self.engine.step()
                if failed := [output.error for output in outputs if output.error is not None]:
                    raise failed[0]
                tokens += sum(len(output.new_token_ids) for output in outputs)
                if use_tqdm:
                    rate = tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
                    bar.update(sum(output.finished for output in outputs))

    def _output(self, request_id: str, group: list[Request], text: str | None) -> RequestOutput:
        metrics = SpecMetrics()
        for request in group:
            metrics.merge(request.metrics)
        return RequestOutput(
            request_id,
            text,
            group[0].prompt_token_ids,
            [self._completion(request, i) for i, request in enumerate(group)],
            metrics=metrics,
            prompt_logprobs=group[0].prompt_logprobs,
            num_cached_tokens=max(group[0].num_cached_tokens, 0),
        )

    def _completion(self, request: Request, index: int) -> CompletionOutput:
        ids, logprobs = request.output_token_ids, request.logprobs
        return CompletionOutput(
            self.engine.text(request),
            ids,
            request.finish_reason,
            request.stop_reason,
            index,
            None if logprobs is None else sum(at[i].logprob for i, at in zip(ids, logprobs, strict=True)),
            logprobs,
        )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
