"""The program that compares the gateway with real vLLM pods, as far as it goes without them."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calinix.edge.hf_folder import load_folder

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
CHAT = {
    "choices": [{"message": {"content": "a b"}}],
    "usage": {"prompt_tokens": 70, "prompt_tokens_details": {"cached_tokens": 64}},
}


@pytest.fixture(autouse=True, scope="module")
def program() -> Iterator[Any]:
    """The program as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    import real_engines

    yield real_engines
    sys.path.remove(str(BENCHMARKS))


def test_answers_are_read_whole_and_streamed() -> None:
    """Text, prompt tokens and cached tokens are the same of both; no usage is an error."""
    from harness.processes import BenchmarkError
    from realpods.agreement import read_answer

    pieces = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "a "}}]},
        {"choices": [{"delta": {"content": "b"}}]},
        {"choices": [], "usage": CHAT["usage"]},
    ]
    stream = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    assert read_answer(json.dumps(CHAT).encode()) == ("a b", 70, 64)
    assert read_answer(stream.encode()) == ("a b", 70, 64)
    with pytest.raises(BenchmarkError, match="without usage"):
        read_answer(b'{"choices": []}')


def test_traffic_is_mixed_and_comes_from_its_seed() -> None:
    """Equal seeds draw equal requests; each kind is among them, and is what its name says."""
    from realpods.traffic import SHARES, Kind, Shot, Traffic

    def drawn(seed: int) -> list[Shot]:
        traffic, shots = Traffic(seed), []
        for _ in range(300):
            shots.append(traffic.next())
            traffic.answered(shots[-1], "an answer", 100)
        return shots

    shots = drawn(1)
    assert shots == drawn(1) != drawn(2)
    counts = Counter(shot.kind for shot in shots)
    assert all(counts[kind] > 300 * share / 3 for kind, share in SHARES.items())
    for shot in shots:
        if shot.kind is Kind.SALTED:
            assert shot.body["cache_salt"]
        if shot.kind is Kind.FORKED:
            messages = shot.body["messages"]
            assert isinstance(messages, list)
            assert {"role": "assistant", "content": "an answer"} in messages


def test_wrong_predictions_have_a_reason() -> None:
    """An answer's blocks only without events; what no reason fits is said to be unexplained."""
    from realpods.agreement import Compared, reason_of
    from realpods.traffic import Kind

    def reasons(kind: Kind, predicted: int, overlapped: bool) -> tuple[str, str]:
        one = Compared(1, kind, "pod-1", 200, predicted, 64, overlapped)
        return reason_of(one, known=True), reason_of(one, known=False)

    assert reasons(Kind.FORKED, 32, False)[0] == "unexplained"
    assert "answer" in reasons(Kind.FORKED, 32, True)[1]
    assert "order" in reasons(Kind.SHARED, 96, False)[1]
    assert all("another request" in why for why in reasons(Kind.SALTED, 0, True))


def test_the_model_can_be_read(tmp_path: Path) -> None:
    """Its tokenizer makes ids of a chat, and its weights are where their header says."""
    from realpods.model import END, make_model

    make_model(tmp_path)
    folder = load_folder(str(tmp_path))
    assert folder.tokenizer.encode("import list").ids
    assert folder.tokenizer.token_to_id("<|im_end|>") == END
    data = (tmp_path / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert max(ends) == len(data) - 8 - size
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == END


def test_what_does_not_hold_is_found(program: Any) -> None:
    """One wrong prediction in ten, a pair that never moved KV, a warm restart: each is told."""
    from realpods.agreement import Agreement
    from realpods.lives import Forgotten
    from realpods.transfer import Transferred

    def report(equal: int, predicted: int, moved: float, end: str) -> Any:
        agreement = Agreement(
            name="with KV events", requests=600, cancelled=0, compared=600, hits=500, equal=equal,
            within_a_block=600, evicted_blocks={"pod-1": 99}, by_pod={"pod-1": (600, equal, 600)},
            kinds={}, seconds=1.0, rest=[], reasons={},
        )  # fmt: skip
        lost = Forgotten("restart", 64, 64, predicted, 0, 0.0, {})
        pair = Transferred("plain", 1, 1, 1, moved, 9, {"incomplete": end}, True, [])
        return program.Report("0", [agreement], None, {"restart": lost}, [pair])

    def failed(one: Any) -> list[str]:
        return [found.what for found in program.findings(one, quick=False) if not found.holds]

    assert failed(report(600, 0, 32.0, "200")) == []
    assert failed(report(540, 0, 32.0, "200")) == ["with KV events: pod-1, predicted = counted"]
    assert failed(report(600, 64, 32.0, "200")) == ["restart"]
    assert len(failed(report(600, 0, 0.0, "500"))) == 2


def test_without_vllm_it_is_said_aloud(
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No venv: SKIPPED on the console, and NOT RUN with the reason among what must hold."""
    from checks import engines
    from harness.acceptance import Verdict
    from realpods import install

    monkeypatch.setenv(install.VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["real_engines.py", "--build"])
    assert program.main() == 0
    assert "SKIPPED" in capsys.readouterr().out
    (row,) = engines.correctness(None)  # type: ignore[arg-type]
    assert row.verdict is Verdict.NOT_RUN
    assert install.VARIABLE in row.figures
