"""A model's own tokenizer: from a request's body to the token ids that its engine will make of it.

Nothing here is remembered: that is edge/prompt_desk.py's, in a process of its own.
"""

from __future__ import annotations

import os
import sys
from array import array
from typing import Any

import msgspec

from calinix.config.tokens import Tokenizing
from calinix.core.prompt import Endpoint
from calinix.core.segments import Cutter, cuttable
from calinix.engines import vllm_chat
from calinix.engines.vllm_chat import ChatRequest
from calinix.errors import ConfigError

# One text at a time: the library's own threads would only be in the way. Read when it is imported.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
try:
    from calinix.edge.chat_template import ChatTemplate, TemplateRefusedError
    from calinix.edge.hf_folder import HfFolder, load_folder, read_template
except ImportError as error:
    raise ConfigError(
        [f"gateway.tokenizer hf: needs the extra calinix[hf] ({error.name} is missing)"]
    ) from error

MAX_PIECE_CHARS = 393_216
"""A longer piece (100,000 tokens) is not tokenised: it would hold up everything else."""
_SAMPLES = ("a", "b c", "\n1")
_ROLES = ("system", *("user", "assistant") * 3, "user")
_CONVERSATION = [{"role": r, "content": f"(text {n})"} for n, r in enumerate(_ROLES)]


class HfTokenizer:
    """Texts of requests, cut where tokenising is exact, and their ids. Any thread may ask."""

    def __init__(
        self,
        folder: HfFolder,
        *,
        template: str | None = None,
        as_parts: bool | None = None,
        defaults: dict[str, Any] | None = None,
    ):
        """`template` goes before those of the folder; `defaults` are the engine's variables.

        Raises ConfigError: a chat template cannot be read.
        """
        self._tokenizer = folder.tokenizer
        self._defaults = defaults or {}
        sources = folder.templates if template is None else {"default": template}
        try:
            self._templates = {
                name: ChatTemplate(source, folder.special_tokens, as_parts=as_parts)
                for name, source in sources.items()
            }
        except TemplateRefusedError as error:
            raise ConfigError([f"{folder.path}: {error}"]) from None
        self.cutter = Cutter(self._marks(cuttable(folder.added)))
        self._around = self._special_ids()

    @property
    def has_template(self) -> bool:
        """Whether chats can be tokenised, not only completions."""
        return "default" in self._templates

    def chat_text(self, request: ChatRequest) -> str:
        """What the engine makes of a chat before it tokenises it.

        Raises UnusualError and TemplateRefusedError: that cannot be said.
        """
        name = "default"
        if request.tools is not None and "tool_use" in self._templates:
            name = "tool_use"
        template = self._templates.get(name)
        if template is None:
            raise TemplateRefusedError("there is no chat template")
        return template.render(
            vllm_chat.conversation(request, as_parts=template.as_parts),
            vllm_chat.tools(request),
            vllm_chat.variables(request, self._defaults),
        )

    def ids_of(self, endpoint: Endpoint, body: bytes) -> bytes | None:
        """The ids of a request's prompt, tokenised at once; None: they cannot be told."""
        try:
            if endpoint is Endpoint.COMPLETIONS:
                completion = vllm_chat.read_completion(body)
                if completion is None:
                    return None
                text, special = completion
            else:
                request = vllm_chat.read_chat(body) if endpoint is Endpoint.CHAT else None
                if request is None:
                    return None
                text, special = self.chat_text(request), request.add_special_tokens
        except (vllm_chat.UnusualError, TemplateRefusedError):
            return None
        return self.whole(text, add_special_tokens=special)

    def encode(self, pieces: list[str]) -> list[bytes]:
        """The ids of each piece, little-endian u32, without any special tokens around them."""
        found = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [_packed(encoding.ids) for encoding in found]

    def around(self) -> tuple[bytes, bytes] | None:
        """The tokenizer's own special ids before and behind a text; None: not the same for all."""
        return self._around

    def whole(self, text: str, *, add_special_tokens: bool) -> bytes:
        """The ids of a text at once, as an engine asks for them."""
        found = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return _packed(found[0].ids)

    def _special_ids(self) -> tuple[bytes, bytes] | None:
        added = self.whole("", add_special_tokens=True)
        for place in range(0, len(added) + 1, 4):
            before, behind = added[:place], added[place:]
            if all(
                self.whole(text, add_special_tokens=True)
                == before + self.whole(text, add_special_tokens=False) + behind
                for text in _SAMPLES
            ):
                return before, behind
        return None

    def _marks(self, candidates: list[str]) -> list[str]:
        """As few of these as it takes for each message of a conversation to be alone in a piece."""
        texts = self._samples()
        chosen: list[str] = []
        left = _crowded(texts, chosen)
        while left:
            after = {mark: _crowded(texts, [*chosen, mark]) for mark in candidates}
            best = min(after, key=lambda mark: after[mark], default="")
            if not best or after[best] >= left:
                break
            chosen.append(best)
            left = after[best]
        return chosen

    def _samples(self) -> list[str]:
        """A conversation, as each template writes it."""
        texts = []
        for template in self._templates.values():
            # Some templates know no system role.
            for messages in (_CONVERSATION, _CONVERSATION[1:]):
                request = ChatRequest(messages=messages)
                given = vllm_chat.conversation(request, as_parts=template.as_parts)
                try:
                    texts.append(template.render(given, None, {"add_generation_prompt": True}))
                except TemplateRefusedError:
                    continue
        return texts


def _crowded(texts: list[str], marks: list[str]) -> int:
    """How many messages of these texts share their piece with one before."""
    cut = Cutter(marks).cut
    return sum(max(piece.count("(text ") - 1, 0) for text in texts for piece in cut(text))


def tokenizer_of(path: str, settings: Tokenizing) -> HfTokenizer:
    """The tokenizer of a folder, as configured. Raises ConfigError."""
    try:
        defaults = msgspec.json.decode(settings.template_arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError([f"gateway.tokenizing.templateArguments: {error}"]) from None
    template = settings.chat_template
    return HfTokenizer(
        load_folder(path),
        template=None if template is None else read_template(template),
        as_parts={"auto": None, "string": False, "openai": True}[settings.content_format],
        defaults=defaults,
    )


def _packed(ids: list[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
