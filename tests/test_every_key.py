"""No key without an effect: for each key of the configuration, the test that proves what it does.

A new key fails here until a test shows its effect and is named below; so does a test that is gone.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import msgspec

from calinix.config import Config

TESTS = Path(__file__).parent
GROUPS = ("single", "dispatch.prefill", "dispatch.decode")
ROUTING = "gateway/test_key_routing.py"
EFFECTS = "gateway/test_key_effects.py"
TIMES = "gateway/test_gateway_timeouts.py"
LIFE = "gateway/test_gateway_life.py"
DRAWN = "properties/test_determinism.py"
RELOAD = "gateway/test_reload.py"
KV = "gateway/test_kv_gateway.py"
SCRAPER = "edge/test_scraper.py"
TOKENS = "tokens/test_tokenizers.py"
EXACT = "tokens/test_gateway_tokens.py"
PAIRS = "gateway/test_dispatch_protocols.py"

PROOFS = {
    "version": f"{EFFECTS}::test_what_a_file_says_of_itself",
    # One struct serves all three groups of pods.
    "pods.id": "gateway/test_gateway_admin.py::test_pods_as_the_router_knows_them",
    "pods.url": f"{RELOAD}::test_pods_come_go_and_move",
    "pods.maxConns": "gateway/test_gateway_queue.py::test_full_pods_are_waited_for_in_order",
    "pods.labels.host": f"{ROUTING}::test_weight_of_locality_and_the_labels",
    "pods.labels.zone": f"{ROUTING}::test_weight_of_locality_and_the_labels",
    "pods.apiKey": "gateway/test_gateway_auth.py::test_whose_key_goes_where",
    "pods.models": f"{RELOAD}::test_settings_of_a_pod",
    "pods.model": "gateway/test_gateway_queue.py::test_nobody_waits_behind_another_model",
    "pods.kvCapacityTokens": "core/test_prepare.py::test_a_mirror_is_as_large_as_the_pods_kv_cache",
    "pods.kvEvents.endpoint": f"{KV}::test_what_others_sent_to_a_pod_is_known",
    "pods.kvEvents.replayEndpoint": f"{KV}::test_lost_events_are_asked_for_again",
    "pods.kvEvents.ranks": "edge/test_kv_feed.py::test_ranks_count_up_from_the_ports",
    "pods.kvEvents.topic": f"{KV}::test_a_bound_endpoint_for_many_pods",
    "pods.kvEvents.baseModel": f"{KV}::test_the_base_model_is_asked_for_or_configured",
    "upstreams.single.mode": f"{EFFECTS}::test_what_a_file_says_of_itself",
    "pods.bootstrapPort": f"{PAIRS}::test_bootstrap_host_and_port_of_the_config",
    "pods.bootstrapHost": f"{PAIRS}::test_bootstrap_host_and_port_of_the_config",
    "upstreams.dispatch.prefillThreshold": f"{PAIRS}::test_prefill_threshold",
    "upstreams.dispatch.mode": f"{EFFECTS}::test_what_a_file_says_of_itself",
    "upstreams.dispatch.protocol": f"{EFFECTS}::test_dispatch_protocols",
    "upstreams.tls.caFile": f"{LIFE}::test_pods_over_tls",
    "upstreams.tls.verify": f"{LIFE}::test_pods_over_tls",
    "gateway.host": f"{EFFECTS}::test_addresses",
    "gateway.port": "e2e/test_serve.py::test_a_taken_port_is_a_clear_error",
    "gateway.workers": "e2e/test_workers.py::test_all_workers_serve_and_the_admin_speaks_for_all",
    "gateway.strategy.name": f"{RELOAD}::test_settings_of_the_gateway",
    **{
        f"gateway.strategy.{role}.{score}": f"{ROUTING}::test_weight_of_the_{what}"
        for role in ("single", "prefill", "decode")
        for score, what in (("cache", "cache"), ("load", "load"), ("sticky", "session"))
    },
    "gateway.strategy.decode.locality": f"{ROUTING}::test_weight_of_locality_and_the_labels",
    "gateway.strategy.single.locality": f"{ROUTING}::test_locality_is_for_decode_alone",
    "gateway.strategy.prefill.locality": f"{ROUTING}::test_locality_is_for_decode_alone",
    "gateway.strategy.imbalance.enabled": f"{ROUTING}::test_imbalance",
    "gateway.strategy.imbalance.factor": f"{ROUTING}::test_imbalance",
    "gateway.strategy.imbalance.offset": f"{ROUTING}::test_imbalance",
    "gateway.strategy.imbalance.copyOffset": f"{ROUTING}::test_copy_offset",
    "gateway.defaultMode": "core/test_admission.py::test_without_a_wish_the_default_then_single",
    "gateway.tokenizer": f"{ROUTING}::test_tokenizer_and_block_size",
    "gateway.tokenizing.chatTemplate": f"{TOKENS}::test_settings_of_the_engine",
    "gateway.tokenizing.contentFormat": f"{TOKENS}::test_settings_of_the_engine",
    "gateway.tokenizing.templateArguments": f"{TOKENS}::test_settings_of_the_engine",
    "gateway.tokenizing.waitMs": f"{EXACT}::test_late_tokens_do_not_hold_up_a_request",
    "gateway.tokenizing.processes": f"{EXACT}::test_processes",
    "gateway.tokenizing.cacheBytes": f"{EXACT}::test_cache_bytes",
    "gateway.tokenizing.checkMs": (
        "tokens/test_token_trust.py::test_pods_with_other_tokens_are_not_believed"
    ),
    "gateway.blockSize": f"{ROUTING}::test_tokenizer_and_block_size",
    "gateway.apiKeys": "gateway/test_gateway_auth.py::test_only_with_a_key",
    "gateway.forwardAuthorization": "gateway/test_gateway_auth.py::test_forward_authorization",
    "gateway.sessionFromUser": f"{EFFECTS}::test_session_from_user",
    "gateway.injectUsage": (
        "gateway/test_inject_usage.py::test_the_extra_chunk_is_seen_here_and_nowhere_else"
    ),
    "gateway.passthroughPaths": "gateway/test_routes.py::test_further_paths_of_the_config",
    "gateway.deterministic": f"{DRAWN}::test_deterministic_mode_needs_no_seed",
    "gateway.seed": f"{EFFECTS}::test_seed",
    "gateway.decisionsKept": "gateway/test_gateway_admin.py::test_the_ring_of_decisions_is_bounded",
    "gateway.limits.headerBytes": f"{EFFECTS}::test_limits",
    "gateway.limits.bodyBytes": f"{EFFECTS}::test_limits",
    "gateway.limits.connections": f"{EFFECTS}::test_limits",
    "gateway.limits.pipelinedRequests": f"{EFFECTS}::test_limits",
    "gateway.timeouts.connectMs": f"{TIMES}::test_connect_ms",
    "gateway.timeouts.firstTokenMs": f"{TIMES}::test_first_token_ms",
    "gateway.timeouts.idleMs": f"{TIMES}::test_idle_ms",
    "gateway.timeouts.totalMs": f"{TIMES}::test_total_ms",
    "gateway.timeouts.prefillMs": (
        "gateway/test_gateway_dispatch.py::test_a_prefill_that_follows_a_hung_one_has_its_own_time"
    ),
    "gateway.timeouts.clientMs": f"{TIMES}::test_client_ms_and_keep_alive_ms",
    "gateway.timeouts.keepAliveMs": f"{TIMES}::test_client_ms_and_keep_alive_ms",
    "gateway.timeouts.drainMs": "e2e/test_serve.py::test_a_drain_ends_after_drain_ms",
    "gateway.retries": "gateway/test_gateway_retries.py::test_without_retries",
    "gateway.waiting.maxRequests": "gateway/test_gateway_queue.py::test_the_queue_has_a_bound",
    "gateway.waiting.timeoutMs": "gateway/test_gateway_queue.py::test_a_wait_has_an_end",
    "gateway.tls.certFile": f"{LIFE}::test_renewed_certificates",
    "gateway.tls.keyFile": f"{LIFE}::test_renewed_certificates",
    "health.endpoint": f"{RELOAD}::test_probes_change_at_once",
    "health.intervalMs": f"{RELOAD}::test_probes_change_at_once",
    "health.timeoutMs": f"{EFFECTS}::test_probe_time_out",
    "health.healthyThreshold": f"{ROUTING}::test_probe_thresholds",
    "health.unhealthyThreshold": f"{ROUTING}::test_probe_thresholds",
    "health.passive.enabled": f"{ROUTING}::test_passive_rules",
    "health.passive.failures": f"{ROUTING}::test_passive_rules",
    "health.passive.ejectMs": f"{ROUTING}::test_passive_rules",
    "health.passive.maxEjectMs": f"{ROUTING}::test_passive_rules",
    "health.passive.slowFactor": f"{ROUTING}::test_slow_factor",
    "cacheRegistry.enabled": f"{ROUTING}::test_registry_enabled",
    "cacheRegistry.maxPods": "core/test_pods.py::test_more_pods_than_slots",
    "cacheRegistry.shardsCount": f"{ROUTING}::test_shards_count",
    "cacheRegistry.staleTtlMs": f"{ROUTING}::test_stale_ttl",
    "cacheRegistry.kvCapacityTokens": (
        "core/test_prepare.py::test_a_mirror_is_as_large_as_the_pods_kv_cache"
    ),
    "cacheRegistry.tokenBlockSize": (
        "core/test_prepare.py::test_token_ids_have_a_block_size_of_their_own"
    ),
    "cacheRegistry.calibrate": (
        "core/test_calibration.py::test_calibrate_false_shows_errors_and_doubts_nobody"
    ),
    "scrape.when": f"{SCRAPER}::test_never",
    "scrape.path": f"{SCRAPER}::test_another_path",
    "scrape.intervalMs": f"{SCRAPER}::test_interval_ms",
    "scrape.timeoutMs": f"{SCRAPER}::test_stale_figures_fail_soft",
    "scrape.pageBytes": f"{SCRAPER}::test_pods_without_figures",
    "kvEvents.bind": f"{KV}::test_a_bound_endpoint_for_many_pods",
    "kvEvents.apply": f"{KV}::test_with_a_text_tokenizer_events_can_only_clear",
    "kvEvents.checkMs": f"{KV}::test_a_restarted_pod_is_cold_at_once",
    "sessions.maxSessions": f"{ROUTING}::test_sessions",
    "sessions.ttlMs": f"{ROUTING}::test_sessions",
    "controller.enabled": "core/test_steering.py::test_controller_off",
    "controller.stepMs": "core/test_steering.py::test_time_between_steps",
    "controller.horizon": "core/test_steering.py::test_horizon",
    "controller.weightMin": "core/test_steering.py::test_bounds_of_weights",
    "controller.weightMax": "core/test_steering.py::test_bounds_of_weights",
    "controller.regularisation": "core/test_steering.py::test_price_of_unequal_weights",
    "controller.mode": "core/test_steering.py::test_mode",
    "gateway.strategy.predictive.attentionTokens": "core/test_steering.py::test_attention",
    "gateway.strategy.predictive.queuePrice": "core/test_steering.py::test_price_of_queues",
    "gateway.strategy.predictive.crowding": "core/test_steering.py::test_price_of_a_crowd",
    "gateway.strategy.predictive.fallback": "core/test_steering.py::test_fallback_to_turns",
    "admin.enabled": "gateway/test_gateway_admin.py::test_without_an_admin_port",
    "admin.host": f"{EFFECTS}::test_addresses",
    "admin.port": "e2e/test_serve.py::test_a_taken_port_is_a_clear_error",
    "log.level": "test_logging.py::TestLogging::test_levels",
    "log.format": "test_logging.py::TestLogging::test_console_where_somebody_does",
    "log.requests": "e2e/test_serve.py::test_one_line_for_each_request",
    "log.requestsFile": "gateway/test_gateway_admin.py::test_metrics_add_up",
    "log.journalFile": "e2e/test_journal.py::test_a_killed_gateway_leaves_a_journal",
    "log.journalMaxBytes": "edge/test_journal_file.py::test_a_journal_is_bounded",
}


def leaves(kind: Any, path: str) -> list[str]:
    """The keys at and below a type: a struct's, a list's items', or the key itself."""
    inner = [getattr(kind, name, None) for name in ("type", "item_type")]
    inner += [*getattr(kind, "types", ()), *(getattr(kind, "item_types", None) or ())]
    found = [leaf for part in inner if part is not None for leaf in leaves(part, "")]
    if isinstance(kind, msgspec.inspect.StructType):
        for field in kind.fields:
            found += leaves(field.type, f".{field.encode_name}")
    return [path + leaf for leaf in found if leaf] or [path]


@functools.cache
def keys() -> frozenset[str]:
    """Every key of the configuration that holds a value; the pods of all groups as `pods`."""
    found = {leaf.removeprefix(".") for leaf in leaves(msgspec.inspect.type_info(Config), "")}
    for group in GROUPS:
        found = {key.replace(f"upstreams.{group}.pods.", "pods.") for key in found}
    return frozenset(found)


@functools.cache
def known_tests() -> frozenset[str]:
    """Every test by its id, read from the source."""
    found = set[str]()
    for path in TESTS.rglob("test_*.py"):
        file = str(path.relative_to(TESTS))
        for node in ast.parse(path.read_text("utf-8")).body:
            named = [("", node)]
            if isinstance(node, ast.ClassDef):
                named = [(f"{node.name}::", part) for part in node.body]
            found |= {
                f"{file}::{owner}{part.name}"
                for owner, part in named
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                and part.name.startswith("test_")
            }
    return frozenset(found)


def test_every_key_has_its_proof() -> None:
    """Each key is in the table, and the table speaks of no key that is gone."""
    assert len(keys()) > 80
    assert not keys() - PROOFS.keys(), "keys without a test of their effect"
    assert not PROOFS.keys() - keys(), "keys that are no more"


def test_every_proof_is_there() -> None:
    """Each test that is named exists."""
    gone = {key: proof for key, proof in PROOFS.items() if proof not in known_tests()}
    assert not gone


class Inner(msgspec.Struct):
    """A section."""

    deep: int


class Outer(msgspec.Struct, rename="camel"):
    """A file with every way to hold a section."""

    plain: str
    a_list: tuple[Inner, ...]
    maybe: Inner | None
    short_or_long: str | Inner


def test_a_new_key_would_be_seen() -> None:
    """Keys are found at every depth: in lists, in optional sections, in either form of a value."""
    found = leaves(msgspec.inspect.type_info(Outer), "")
    assert set(found) == {".plain", ".aList.deep", ".maybe.deep", ".shortOrLong.deep"}
