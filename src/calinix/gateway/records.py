"""What is kept of a request at its end: from a flight to its record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calinix.engines.usage import Usage
from calinix.telemetry import RequestRecord

if TYPE_CHECKING:
    from calinix.gateway.proxy import Flight


def cached_tokens(prefill: Usage | None, answer: Usage | None) -> int | None:
    """The real prefix hit: of the pod that prefilled, as far as that is known."""
    if prefill is not None and prefill.cached_tokens is not None:
        return prefill.cached_tokens
    return answer.cached_tokens if answer is not None else None


def record_of(flight: Flight, now: float, error: str, usage: Usage | None) -> RequestRecord:
    """The record of a flight that has ended at `now`; `error` is empty when all went well."""
    plan = flight.plan
    received_s = flight.request.received_at
    first_s = flight.first_token_s
    # Some events carry several tokens, some none; what the pod counted is better.
    steps = ((usage and usage.output_tokens) or flight.chunks) - 1
    return RequestRecord(
        request_id=flight.route_request.request_id,
        endpoint=flight.client.label,
        mode=plan.mode if plan else (flight.route_request.mode or ""),
        strategy=plan.strategy if plan else "",
        model=flight.parsed.model,
        status=flight.status,
        pod_id=plan.pod.id if plan else "",
        prefill_pod_id=plan.prefill.id if plan and plan.prefill else "",
        e2e_us=int((now - received_s) * 1e6),
        ttft_us=int((first_s - received_s) * 1e6) if first_s else None,
        itl_us=(
            int((flight.last_token_s - first_s) * 1e6 / steps) if first_s and steps > 0 else None
        ),
        decision_us=int(flight.decision_s * 1e6),
        prompt_blocks=plan.prompt_blocks if plan else 0,
        cached_blocks=plan.cached_blocks if plan else 0,
        predicted_cached_tokens=plan.predicted_cached_tokens if plan else None,
        prompt_tokens=usage.prompt_tokens if usage else None,
        cached_tokens=cached_tokens(flight.prefill_usage, usage),
        output_tokens=usage.output_tokens if usage else None,
        chunks=flight.chunks,
        retries=flight.retries,
        retry_reason=flight.retry_reason,
        error=error,
        bytes_out=flight.written_bytes,
    )
