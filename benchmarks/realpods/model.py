"""A tiny model with random weights that vLLM serves: its tokenizer, its weights, its settings.

Nothing is downloaded: the tokenizer is trained on the files of Python's own library. Weights are
spread widely, so that greedy answers depend on the whole prompt.
"""

from __future__ import annotations

import struct
import sysconfig
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2, 64, 128, 2, 1, 2048
CONTEXT = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEED = 20260714
SPREAD = 0.3
TRAINED_ON = 100


def make_model(folder: Path) -> None:
    """Writes the model into `folder`, which need not exist; takes a few seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config())
    _write(folder / "config.json", _config())
    _write(folder / "generation_config.json", {"eos_token_id": END})
    (folder / "model.safetensors").write_bytes(_safetensors(_weights()))


def _write(path: Path, content: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _tokenizer() -> Tokenizer:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [str(path) for path in sorted(library.glob("*.py"))[:TRAINED_ON]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(files, trainer)
    return tokenizer


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }


def _config() -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": END,
        "pad_token_id": 0,
    }


def _weights() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    kv = KV_HEADS * (HIDDEN // HEADS)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.q_proj.bias": (HIDDEN,),
            f"{at}self_attn.k_proj.weight": (kv, HIDDEN),
            f"{at}self_attn.k_proj.bias": (kv,),
            f"{at}self_attn.v_proj.weight": (kv, HIDDEN),
            f"{at}self_attn.v_proj.bias": (kv,),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    random = np.random.default_rng(SEED)
    weights = {
        name: random.normal(0.0, SPREAD, shape).astype(np.float32) for name, shape in shapes.items()
    }
    norms = [f"model.layers.{layer}.{name}_layernorm.weight"
             for layer in range(LAYERS) for name in ("input", "post_attention")]  # fmt: skip
    return weights | {name: np.ones(HIDDEN, np.float32) for name in [*norms, "model.norm.weight"]}


def _safetensors(weights: dict[str, np.ndarray]) -> bytes:
    """The weights in one file: the length of a JSON header, the header, the numbers."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in weights.items():
        header[name] = {
            "dtype": "F32",
            "shape": values.shape,
            "data_offsets": (at, at + values.nbytes),
        }
        at += values.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    numbers = b"".join(values.astype("<f4").tobytes() for values in weights.values())
    return struct.pack("<Q", len(text)) + text + numbers
