"""Calibration over real sockets: what pods report, against what was believed, for people."""

from __future__ import annotations

import kit
from fleets import gateway_of
from gatewaykit import CHAT, Served, admin, answer, chat_body, config_of, metrics, raw_pod


@kit.on_loop
async def test_a_pod_that_reports_no_hits_is_seen_to_lose_trust() -> None:
    """In the admin view, in the metrics and in the decision: the lack, the trust, what is left."""

    async def forgets(served: Served) -> None:
        usage = b'"prompt_tokens":1000,"completion_tokens":1'
        details = b'"prompt_tokens_details":{"cached_tokens":0}'
        await served.say(answer(b'{"choices":[],"usage":{%b,%b}}' % (usage, details)))

    strategy = {"gateway": {"strategy": "cacheOnly"}}
    async with raw_pod(forgets) as pod, gateway_of(config_of(strategy, a=pod)) as app:
        for _ in range(20):
            await kit.http(app.server.port, "POST", CHAT, chat_body("Say it again. " * 300))
        shown = (await admin(app, "/admin/pods"))["pods"][0]["calibration"]
        assert shown["cacheSamples"] == 20
        assert shown["cacheLack"] > 0.8
        assert shown["trust"] < 0.2
        labels = {"pod_id": "a", "role": "single"}
        samples = await metrics(app)
        assert samples["calinix_pod_cache_trust", frozenset(labels.items())] == shown["trust"]
        assert samples["calinix_pod_cache_lack_ratio", frozenset(labels.items())] > 0.8
        compared = frozenset({**labels, "kind": "cache"}.items())
        assert samples["calinix_pod_compared_total", compared] == 20
        decision = (await admin(app, "/admin/decisions?last=1"))["decisions"][0]
        assert decision["choices"][0]["candidates"][0]["trust"] < 0.2
        assert decision["predicted"]["cachedTokens"] < 0.2 * decision["predicted"]["believedTokens"]


@kit.on_loop
async def test_pods_that_do_not_report_are_not_compared() -> None:
    """Without cached tokens in the answers there are no errors to show, and full trust."""
    async with raw_pod() as pod, gateway_of(config_of(a=pod)) as app:
        await kit.http(app.server.port, "POST", CHAT, chat_body())
        shown = (await admin(app, "/admin/pods"))["pods"][0]["calibration"]
        assert (shown["cacheSamples"], shown["trust"]) == (0, 1.0)
        samples = await metrics(app)
        labels = frozenset({"pod_id": "a", "role": "single"}.items())
        assert samples["calinix_pod_cache_trust", labels] == 1.0
        assert ("calinix_pod_cache_error_ratio", labels) not in samples
