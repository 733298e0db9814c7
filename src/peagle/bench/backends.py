"""The two ways to run an arm, behind the same three calls: the engine in this process, and any server over HTTP."""

from __future__ import annotations

import contextlib
import gc
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import peagle
from peagle.bench import endpoints, server_commands
from peagle.bench.arms import ENGINES, GivenEndpoint, Setup
from peagle.bench.conversations import Chat
from peagle.bench.counters import cache_between, spec_between, went_down
from peagle.bench.identity import prefix_caching
from peagle.bench.in_process import run_in_process
from peagle.bench.load_client import Endpoint, OnRecord, Sampling, run_load
from peagle.bench.questions import Questions
from peagle.bench.records import Run
from peagle.bench.server_process import free_port, running_server
from peagle.bench.workloads import Workload
from peagle.client.server_facts import read_server
from peagle.errors import InputError
from peagle.target.facts import read_target_config
from peagle.target.model import Target
from peagle.target.text import TargetText

# Counters of a server may reach /metrics a moment after the last token has reached the client.
COUNTER_SECONDS = 0.25
COUNTED_ANEW = (
    "the server's counters went down during the arm (was it started again?), so acceptance or cache hits are not known"
)


@dataclass(frozen=True)
class RunSettings:
    """What all arms of a sweep share.

    speculative_args: by method, further keys of the speculative config. engine_args go to EngineConfig, serve_args and
    vllm_args to the servers' command lines; max_num_seqs and max_model_len to all three.
    """

    target: str
    heads: Mapping[str, str]  # by method
    max_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    dtype: str = "auto"
    device: str | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    speculative_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    serve_args: Sequence[str] = ()
    vllm_args: Sequence[str] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    stall_timeout: float = 120.0
    request_timeout: float = 1800.0
    start_timeout: float = 900.0
    api_key: str | None = field(default=None, repr=False)

    def synthetic(self, setup: Setup) -> bool:
        """Whether drafts are accepted whatever they are, so that what comes out is no answer. Only engines that are
        loaded or started here are told so; an endpoint drafts as it was started."""
        if setup.engine not in ENGINES:
            return False
        further = self.speculative_args.get(setup.method, {})
        return further.get("rejection_sample_method", "standard") == "synthetic"


class Backend(Protocol):
    """A loaded engine or a running server. command: how to start the like of it; facts: what it says of itself; target:
    the model where it is in this process."""

    command: str
    facts: dict[str, Any]
    target: Target | None

    def questions(self, workload: Workload, max_tokens: int, first_turns: bool = False) -> Questions: ...

    def reset_cache(self) -> str | None:
        """Forget earlier prompts; a note where that is not possible."""

    def run(
        self, questions: Questions, concurrency: int, on_record: OnRecord | None, limit: int | None = None
    ) -> Run: ...


class InProcess:
    """This project's engine. Built anew for every setup, and for every arm where it caches prefixes, so that nothing of
    another one is left in it."""

    def __init__(self, setup: Setup, settings: RunSettings, target: Target) -> None:
        from peagle.config.engine import EngineConfig
        from peagle.config.speculative import SpeculativeConfig
        from peagle.engine.loading import load_engine

        config: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": settings.max_num_seqs}
        config |= {"max_model_len": settings.max_model_len, **settings.engine_args}
        head = settings.heads.get(setup.method)
        speculative = None
        if head is not None:
            speculative = SpeculativeConfig.parse(
                server_commands.speculative_settings(setup, head, settings.speculative_args.get(setup.method, {})) or {}
            )
        self.engine = load_engine(target, speculative, config=EngineConfig(**config))
        self.chat = Chat(target) if target.tokenizer is not None else None
        self.target: Target | None = target
        self.sampling = settings.sampling
        dtype = str(target.dtype).removeprefix("torch.")
        self.command = f"in process: {setup.label}, {dtype} on {target.device}, {config}"
        self.facts = {
            "model": settings.target,
            "tokenizer": settings.target if target.tokenizer is not None else None,
            "version": peagle.__version__,
            "dtype": dtype,
            "device": str(target.device),
        }

    def questions(self, workload: Workload, max_tokens: int, first_turns: bool = False) -> Questions:
        return Questions(workload, self.chat, max_tokens, self.engine.max_model_len, first_turns)

    def reset_cache(self) -> str | None:
        return None  # off, or as new: `Backends.needs_fresh`, and prompts of the warm-up are not measured

    def run(self, questions: Questions, concurrency: int, on_record: OnRecord | None, limit: int | None = None) -> Run:
        return run_in_process(self.engine, questions, concurrency, self.sampling, on_record, limit)


class OverHttp:
    """A server, whoever runs it. chat: makes token ids of prompts; None sends messages. own: started here, with its
    prefix cache off, or as new but for the warm-up's prompts, which are not measured."""

    target: Target | None = None

    def __init__(self, endpoint: Endpoint, chat: Chat | None, sampling: Sampling, command: str, own: bool) -> None:
        told = read_server(endpoint.url, endpoint.api_key)
        self.endpoint, self.chat, self.sampling = endpoint, chat, sampling
        self.max_model_len = told.max_model_len
        self.command, self.own = command, own
        tokenizer = chat.name if chat is not None else None
        self.facts: dict[str, Any] = {"model": endpoint.model, "tokenizer": tokenizer, "version": told.version}

    def questions(self, workload: Workload, max_tokens: int, first_turns: bool = False) -> Questions:
        return Questions(workload, self.chat, max_tokens, self.max_model_len, first_turns)

    def reset_cache(self) -> str | None:
        if self.own or endpoints.reset_prefix_cache(self.endpoint.url, self.endpoint.api_key):
            return None
        return "the server's prefix cache, if it has one, could not be emptied"

    def run(self, questions: Questions, concurrency: int, on_record: OnRecord | None, limit: int | None = None) -> Run:
        url, key = self.endpoint.url, self.endpoint.api_key
        before = endpoints.read_counters(url, key)
        run = run_load(self.endpoint, questions, concurrency, self.sampling, on_record, limit)
        if before is None:
            return run
        time.sleep(COUNTER_SECONDS)
        after = endpoints.read_counters(url, key)
        if after is not None:
            run.spec = spec_between(before, after)
            run.cache_queries, run.cache_hits = cache_between(before, after)
            if went_down(before, after):
                run.notes.append(COUNTED_ANEW)
        return run


class Backends:
    """Opens backends one at a time. The target's weights stay in this process only as long as its engine is used."""

    def __init__(
        self, settings: RunSettings, text: TargetText | None, given: Sequence[GivenEndpoint], logs: Path
    ) -> None:
        """text: None where only endpoints are measured that take messages. logs: folder for the servers' output."""
        self.settings, self.text, self.logs = settings, text, logs
        self.given = {endpoint.setup: endpoint for endpoint in given}
        self.chat = Chat(text) if text is not None and text.tokenizer is not None else None
        self._target: Target | None = None

    @contextlib.contextmanager
    def open(self, setup: Setup) -> Iterator[Backend]:
        """Raises InputError, of a server with the end of its log."""
        if setup.engine != "peagle":
            self._target = None
        free_memory()  # of the backend before, which nobody refers to any more
        if setup in self.given:
            yield self._given(self.given[setup])
        elif setup.engine == "peagle":
            try:
                engine = InProcess(setup, self.settings, self._loaded_target())
            except RuntimeError as error:  # PyTorch's, out of memory among them
                raise InputError(f"could not be loaded ({type(error).__name__}: {error})") from error
            yield engine
        else:
            with self._server(setup) as backend:
                yield backend

    def _loaded_target(self) -> Target:
        from peagle.target.loading import load_target

        if self._target is None:
            self._target = load_target(self.settings.target, self.settings.dtype, self.settings.device)
        return self._target

    def _endpoint(self, url: str, model: str, chat_api: bool, api_key: str | None, own: bool) -> Endpoint:
        s = self.settings
        return Endpoint(
            url, model, "chat" if chat_api else "completions", api_key, own, s.extra_body, s.stall_timeout,
            s.request_timeout,
        )  # fmt: skip

    def _given(self, given: GivenEndpoint) -> Backend:
        told = read_server(given.url, self.settings.api_key)
        chat_api = given.api == "chat"
        endpoint = self._endpoint(given.url, given.model or told.model, chat_api, self.settings.api_key, False)
        return OverHttp(
            endpoint, None if chat_api else self.chat, self.settings.sampling, f"endpoint {given.url}", False
        )

    @contextlib.contextmanager
    def _server(self, setup: Setup) -> Iterator[Backend]:
        s, port = self.settings, free_port()
        further = s.speculative_args.get(setup.method, {})
        settings = server_commands.speculative_settings(setup, s.heads.get(setup.method), further)
        options: list[tuple[str, object]] = [("--max-num-seqs", s.max_num_seqs), ("--max-model-len", s.max_model_len)]
        assert self.text is not None
        options.append(("--dtype", same_dtype(s.dtype, self.text, s.device)))
        if setup.engine == "peagle-serve":
            options.append(("--device", s.device))
            args = server_commands.common_args(port, options, s.serve_args)
            command = server_commands.peagle_command(s.target, settings, args)
        else:
            args = server_commands.common_args(port, options, s.vllm_args)
            command = server_commands.vllm_command(self.text.source, settings, args)
        url, log = f"http://127.0.0.1:{port}", self.logs / f"{setup.engine}-{setup.method}-k{setup.k}.log"
        with running_server(command, url, log, server_commands.server_env(command), s.start_timeout):
            model = read_server(url).model
            endpoint = self._endpoint(url, model, False, None, True)
            yield OverHttp(endpoint, self.chat, s.sampling, shlex.join(command), True)

    def needs_fresh(self, setup: Setup) -> bool:
        """Engines that are loaded or started here are made anew for every arm where they cache prefixes."""
        return setup.engine in ENGINES and prefix_caching(self.settings, setup.engine)


def same_dtype(dtype: str, text: TargetText, device: str | None) -> str:
    """What every engine is told: "auto" means different things to vLLM and to this project's engine."""
    import torch

    from peagle.target.loading import auto_dtype

    if dtype != "auto":
        return dtype
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = read_target_config(text.source, text.name_or_path)
    return str(auto_dtype(config, text.name_or_path, where.type)).removeprefix("torch.")


def free_memory() -> None:
    """Give back what a dropped engine held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
