"""The paths of the inference port: what each is, which methods it takes, and what is no path."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.core.prompt import Endpoint
from calinix.gateway.routes import RouteTable, response_id_of

PLAIN = RouteTable(())

POSTS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/messages/count_tokens": Endpoint.OTHER_POST,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
    "/score": Endpoint.POOLING_LIKE,
    "/v1/score": Endpoint.POOLING_LIKE,
    "/rerank": Endpoint.POOLING_LIKE,
    "/v1/rerank": Endpoint.POOLING_LIKE,
    "/v2/rerank": Endpoint.POOLING_LIKE,
    "/classify": Endpoint.POOLING_LIKE,
    "/pooling": Endpoint.POOLING_LIKE,
    "/tokenize": Endpoint.OTHER_POST,
    "/detokenize": Endpoint.OTHER_POST,
    "/v1/audio/transcriptions": Endpoint.OTHER_POST,
    "/v1/audio/translations": Endpoint.OTHER_POST,
    "/v1/audio/speech": Endpoint.OTHER_POST,
}


@pytest.mark.parametrize("path", POSTS)
def test_what_each_path_is(path: str) -> None:
    """Every path takes POST alone, counts as load by its own rule and is its own label."""
    route = PLAIN.find(path)
    assert route is not None
    assert route.endpoints == {"POST": POSTS[path]}
    assert route.allow == b"allow: POST\r\n"
    assert route.label == path


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "*",
        "/v1",
        "/v1/",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "//v1/chat/completions",
        "/v1/chat/%63ompletions",
        "/V1/chat/completions",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/reset_prefix_cache",
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/start_profile",
        "/abort_requests",
        "/mock/faults",
        "/metrics",
        "/load",
        "/version",
        "/admin/pods",
        "/v1/responses/",
        "/v1/responses//cancel",
        "/v1/responses/..",
        "/v1/responses/.",
        "/v1/responses/..%2f..%2freset_prefix_cache",
        "/v1/responses/..\\sleep",
        "/v1/responses/a/b",
        "/v1/responses/a/cancel/",
        "/v1/responses/../../sleep/cancel",
        "/v1/responses/a;b",
        "/v1/responses/" + "a" * 257,
    ],
)
def test_paths_that_are_not_served(path: str) -> None:
    """Paths that change a pod, and spellings that a pod could take for them, lead nowhere."""
    assert PLAIN.find(path) is None
    assert response_id_of(path) is None


@given(st.text(max_size=60))
def test_no_other_path_is_served(path: str) -> None:
    """Whatever comes, a pod is asked only for the paths of the table, with an id at most."""
    for text in (path, "/v1/responses/" + path):
        route = PLAIN.find(text)
        if text in POSTS:
            assert route is not None
        elif route is not None:
            response_id = response_id_of(text)
            assert response_id
            assert text in (
                f"/v1/responses/{response_id}",
                f"/v1/responses/{response_id}/cancel",
            )
            assert re.fullmatch(r"[A-Za-z0-9_-]+", response_id)


def test_stored_responses() -> None:
    """A response is read, deleted and cancelled by its id; the label has none of the ids."""
    one = PLAIN.find("/v1/responses/resp_1-a")
    assert one is not None
    assert one.endpoints == {"GET": Endpoint.GET, "DELETE": Endpoint.GET}
    assert one.allow == b"allow: DELETE, GET\r\n"
    assert one.label == "/v1/responses/{id}"
    cancel = PLAIN.find("/v1/responses/resp_1-a/cancel")
    assert cancel is not None
    assert cancel.endpoints == {"POST": Endpoint.GET}
    assert cancel.label == "/v1/responses/{id}/cancel"
    assert response_id_of("/v1/responses/resp_1-a") == "resp_1-a"
    assert response_id_of("/v1/responses/resp_1-a/cancel") == "resp_1-a"
    assert response_id_of("/v1/responses") is None
    assert response_id_of("/v1/chat/completions") is None


def test_further_paths_of_the_config() -> None:
    """A configured path takes GET, HEAD and POST; it cannot change what a known path is."""
    table = RouteTable(("/v1/custom", "/v1/embeddings"))
    custom = table.find("/v1/custom")
    assert custom is not None
    assert custom.endpoints == {
        "GET": Endpoint.GET,
        "HEAD": Endpoint.GET,
        "POST": Endpoint.OTHER_POST,
    }
    assert custom.allow == b"allow: GET, HEAD, POST\r\n"
    assert table.find("/v1/embeddings") == PLAIN.find("/v1/embeddings")
    assert table.find("/v1/custom/deeper") is None
