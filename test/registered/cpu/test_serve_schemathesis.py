"""Requests that schemathesis makes of the OpenAPI document: no status 500, no hang, and all answers
as the document says.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import LiveServer, live_server
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=25, suite="per-commit")

SECONDS = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = write_text_model(tmp_path_factory.mktemp("models") / "tiny")
    with live_server(model, ["--max-total-tokens", "512"]) as running:
        yield running


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_generated_requests(server: LiveServer, count: int) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["required"]
    api = schemathesis.openapi.from_dict(document)
    operations: list[Any] = [result.ok() for result in api.get_all_operations()]  # type: ignore[union-attr]
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        for operation in operations:
            check(operation, client, server, max(1, count // len(operations)), statuses)
    # Of paths without parameters there is one case each.
    assert sum(statuses.values()) >= 0.5 * count
    assert statuses.get(200) and statuses.get(400)
    assert not [line for line in server.lines if "Traceback" in line]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200


def check(
    operation: Any,
    client: httpx.Client,
    server: LiveServer,
    count: int,
    statuses: dict[int, int],
) -> None:
    @seed(16)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and "max_tokens" in case.body:
            case.body["max_tokens"] = 4  # what it generates is not what is tried here
        answer = case.call(base_url=server.url, timeout=SECONDS)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (case.body, answer.text)
        case.validate_response(
            answer,
            checks=[
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    run()
