"""Every endpoint of the reward server, asked what its description allows and what it forbids."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from served_scores import KEY, Running, described

schemathesis = pytest.importorskip("schemathesis")
pytest.importorskip("schemathesis.specs.openapi.checks")  # importing it makes its checks known

CHECKS = schemathesis.checks.CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    ]
)
EXAMPLES = 25
"""Of each endpoint: some seconds in all."""


@pytest.fixture(scope="module")
def running():
    async def open_model(name):
        raise FileNotFoundError(name)

    with Running(open_model=open_model) as server:
        yield server


DESCRIPTION = described()
OPERATIONS = [
    (path, method, mode)
    for path, found in DESCRIPTION["paths"].items()
    for method, about in found.items()
    for mode in ("positive", "negative")
    if mode == "positive" or "requestBody" in about  # else there is nothing that it forbids
]


@pytest.fixture(scope="module")
def description():
    return schemathesis.openapi.from_dict(DESCRIPTION)


@pytest.mark.slow_parameters(
    "/classify-post",
    "/v1/embeddings-post",
    "/v1/score-post",
    "/score-post-negative",
    "/get_reward-post",
    "/remote_rm-post-negative",
    "/admin/load-post",
)
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_no_request_makes_the_server_fail(running, description, path, method, mode):
    modes = schemathesis.GenerationMode
    operation = description[path][method]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=modes(mode)))
    def ask(case):
        headers = {"Authorization": f"Bearer {KEY}"}
        response = case.call(base_url=running.url, headers=headers)
        case.validate_response(response, checks=CHECKS)
        if mode == "positive":
            assert response.status_code not in (400, 415), response.text

    ask()
