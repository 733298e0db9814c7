"""Requests made up from the server's own OpenAPI document: whatever comes, no 500, and the server lives on."""

from __future__ import annotations

from typing import Any

import httpx
import hypothesis
import pytest

from tests.server.conftest import Running

schemathesis = pytest.importorskip("schemathesis")


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_makes_a_500(server: Running, mode: str) -> None:
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    generation = GenerationMode.POSITIVE if mode == "positive" else GenerationMode.NEGATIVE
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == "negative" and operation.method.upper() == "GET":
            continue

        @hypothesis.settings(
            max_examples=12,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=generation))
        def check(case: Any) -> None:
            answer = case.call(timeout=60)
            assert answer.status_code < 500, (case.body, answer.text)
            if answer.status_code >= 400:
                assert "error" in answer.json()

        check()
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.settle()
