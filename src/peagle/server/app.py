"""The routes: OpenAI's completions, chat and models, vLLM's tokenize and detokenize, health, version and metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import peagle
from peagle.errors import InputError
from peagle.server.answers import MAX_REPORTED, Answer, Echo
from peagle.server.asgi import ClientGone, EventStream, Guard, error_response, unless_disconnected
from peagle.server.bodies import RefusedBody
from peagle.server.calls import Call
from peagle.server.engine_loop import EngineLoop
from peagle.server.errors import ApiError, ErrorBody, bad_request, shutting_down
from peagle.server.http_metrics import CountRequests
from peagle.server.prompts import Prompts, num_prompts
from peagle.server.protocol import ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody
from peagle.server.sampling import (
    choice_params,
    echoed_logprobs,
    from_input_error,
    sampling_params,
    wanted_logprobs,
)
from peagle.server.seats import Seat
from peagle.server.validation import validation_error

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the access log does
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class AppSettings:
    """model_names: what clients may call the model; the first is what answers and metrics say. allowed_origins: of web
    pages that may ask from a browser, "*" for all."""

    model_names: tuple[str, ...]
    api_keys: Sequence[str] = field(default=(), repr=False)
    stream_interval: int = 1
    allowed_origins: Sequence[str] = ()


def create_app(engine_loop: EngineLoop, settings: AppSettings) -> FastAPI:
    """The app over an engine loop, which it starts and stops."""
    engine = engine_loop.engine
    prompts = Prompts(engine.target.tokenizer, engine.target.vocab_size, engine.max_model_len)
    started = int(time.time())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine_loop.start()
        yield
        await engine_loop.stop()

    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503)
    }
    app = FastAPI(title="peagle", version=peagle.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_keys=settings.api_keys, max_model_len=engine.max_model_len)
    app.add_middleware(CountRequests, metrics=engine_loop.metrics.http)
    if settings.allowed_origins:  # outermost: a browser's first question brings no API key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error))

    @app.exception_handler(RefusedBody)
    async def refused_body(request: Request, error: RefusedBody) -> Response:
        return error_response(error.error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        said = str(error.detail)
        if error.status_code == 404:  # of no route: a model that is not served has an error of its own
            said = f"path: {request.url.path} is not served here, expected one of those in /openapi.json"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            said = f"method: got {request.method} for {request.url.path}, expected {allowed}"
        response = error_response(ApiError(error.status_code, said))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, f"unexpected {type(error).__name__}", type="server_error"))

    def check_model(name: str | None) -> None:
        if name is not None and name not in settings.model_names:
            raise ApiError(
                404,
                f"model: {name[:200]!r} is not served here, expected {' or '.join(map(repr, settings.model_names))}",
                param="model",
                code="model_not_found",
            )

    def check_drafts(wanted: int | None) -> None:
        most = engine.num_speculative_tokens
        if wanted is not None and wanted > most:
            what = f"at most {most}, this server's" if most else "0: this server runs without a head"
            raise bad_request("num_speculative_tokens", f"num_speculative_tokens: got {wanted}, expected {what}")

    def check_reported(answer: Answer, body: ChatBody | CompletionBody, max_tokens: int | None) -> None:
        most = engine.config.max_logprobs
        if most == -1:  # whoever starts a server without that limit wants whole vocabularies
            return
        # a stream's answers leave as they come; what it says of prompts is sent at once
        prompts, answers = answer.reported(0 if body.stream else max_tokens, most)
        if prompts + answers <= MAX_REPORTED:
            return
        name = "top_logprobs" if isinstance(body, ChatBody) and body.top_logprobs else "logprobs"
        if prompts >= answers and body.prompt_logprobs is not None:
            name = "prompt_logprobs"
        raise bad_request(
            name,
            f"{name}: got up to {prompts + answers} tokens to report ({prompts} of prompts, {answers} of answers; "
            f"alternatives count, and every choice), expected at most {MAX_REPORTED}",
        )

    async def generate(body: ChatBody | CompletionBody, request: Request) -> Response:
        # its places are taken before the work of tokenizing, so that no more of that waits than can be run
        with engine_loop.admit((body.n or 1) * num_prompts(body)) as seat:
            answer, call = await unless_disconnected(request.receive, enter(body, seat), seat.failed)
        if body.stream:
            return EventStream(answer.events(call), call.close)
        try:
            whole = await unless_disconnected(request.receive, answer.whole(call))
            return Response(whole, media_type="application/json")
        finally:
            call.close()

    async def enter(body: ChatBody | CompletionBody, seat: Seat) -> tuple[Answer, Call]:
        """Tokenize a request and hand it to the engine."""
        n = body.n or 1
        check_model(body.model)
        check_drafts(body.num_speculative_tokens)
        chat = isinstance(body, ChatBody)
        max_tokens, max_tokens_field = body.max_tokens, "max_tokens"
        echo: Echo | None = None
        if isinstance(body, ChatBody):
            if body.max_completion_tokens is not None:
                if max_tokens not in (None, body.max_completion_tokens):
                    raise bad_request("max_tokens", "max_tokens: expected max_completion_tokens or the same number")
                max_tokens, max_tokens_field = body.max_completion_tokens, "max_completion_tokens"
            params = sampling_params(body, max_tokens)
            token_ids = [await prompts.chat(body)]
        else:
            max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
            params = sampling_params(body, max_tokens)
            token_ids = await prompts.completion(body)
            if body.max_tokens is None:
                max_tokens = None  # the default gives way to a shorter room
            if body.echo:
                echo = Echo(*await prompts.echoed(body, token_ids), only=max_tokens == 0)
        for ids in token_ids:
            prompts.check_length(ids, max_tokens, "messages" if chat else "prompt", max_tokens_field)
        work = [(ids, choice_params(params, choice, bool(body.stream))) for ids in token_ids for choice in range(n)]
        options = body.stream_options or StreamOptions()
        answer = Answer(
            kind="chat" if chat else "text",
            model=body.model or settings.model_names[0],
            prompts=token_ids,
            n=n,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
            return_token_ids=bool(body.return_token_ids),
            return_spec_metrics=bool(body.return_spec_metrics),
            top_logprobs=wanted_logprobs(body),
            prompt_logprobs=echoed_logprobs(body) if body.prompt_logprobs is None else body.prompt_logprobs,
            echo=echo,
        )
        check_reported(answer, body, params.max_tokens)
        interval = settings.stream_interval if body.stream else 0
        try:
            return answer, await engine_loop.submit(seat, work, n, interval)
        except InputError as error:
            raise from_input_error(error, body) from error

    @app.post("/v1/chat/completions", responses=errors)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await generate(body, request)

    @app.post("/v1/completions", responses=errors)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await generate(body, request)

    @app.post("/tokenize", responses=errors)
    async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
        check_model(body.model)
        with engine_loop.admit_tokenizing() as seat:
            return await unless_disconnected(request.receive, prompts.tokenize(body), seat.failed)

    @app.post("/detokenize", responses=errors)
    async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
        check_model(body.model)
        with engine_loop.admit_tokenizing() as seat:
            return await unless_disconnected(request.receive, prompts.detokenize(body), seat.failed)

    @app.get("/v1/models", responses=errors)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in settings.model_names]}

    @app.get("/v1/models/{name:path}", responses=errors)
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return model(name)

    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "peagle",
            "root": engine.target.name_or_path,
            "parent": None,
            "max_model_len": engine.max_model_len,
        }

    @app.get("/health", responses=errors)
    async def health() -> Response:
        if engine_loop.draining:
            raise shutting_down()
        if not engine_loop.healthy:
            raise ApiError(503, "the engine fails at every step", type="server_error")
        return Response()

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": peagle.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(engine_loop.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app
