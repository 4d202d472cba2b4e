"""What a pipeline does with texts: prompts and canvases as token ids, token ids as texts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

from rcd import blanks
from rcd.asking import is_single, stop_tokens
from rcd.data.examples import prompt_ids
from rcd.decode.config import DecodeConfig
from rcd.decode.filling import alone, split
from rcd.errors import RCDError
from rcd.models.checkpoint import Checkpoint

Prompt = str | Sequence[int] | Tensor | Sequence[dict[str, str]]
"""A text, token ids, or chat messages ({"role": ..., "content": ...})."""
Prompts = Prompt | Sequence[Prompt]
Canvas = str | Sequence[int] | Tensor
"""An answer's beginning with masks: a text with `[MASK]` or `[MASK:12]`, or token ids."""
Canvases = Canvas | Sequence[Canvas | None] | None


class Texts:
    """A checkpoint's tokenizer, which is one thread's at a time."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._words = threading.Lock()

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's, if it has one."""
        return self.checkpoint.tokenizer

    @property
    def _mask(self) -> int:
        return self.checkpoint.model.settings.mask_token_id

    def encode(self, prompts: Prompts, chat: bool | None = None) -> list[list[int]]:
        """Every prompt as token ids."""
        if not isinstance(prompts, Iterable):
            raise RCDError(f"prompts are texts, lists of token ids or chat messages, not {type(prompts).__name__}.")
        given: Any = prompts if isinstance(prompts, (str, Sequence)) or hasattr(prompts, "tolist") else list(prompts)
        return [self._encode(prompt, chat) for prompt in ([given] if is_single(given) else given)]

    def _encode(self, prompt: Any, chat: bool | None) -> list[int]:
        if hasattr(prompt, "tolist"):  # a tensor or an array
            prompt = prompt.tolist()
        if not isinstance(prompt, (str, list, tuple)):
            raise RCDError(f"a prompt is a text, a list of token ids or chat messages, not {type(prompt).__name__}.")
        if not isinstance(prompt, str) and not any(isinstance(item, dict) for item in prompt):
            odd = [item for item in prompt if isinstance(item, bool) or not isinstance(item, Integral)]
            if odd:
                raise RCDError(f"token ids are whole numbers, not {odd[0]!r}.")
            return list(map(int, prompt))
        if self.tokenizer is None:
            raise RCDError("this checkpoint has no tokenizer; give the prompt as token ids (--ids).")
        try:
            with self._words:
                ids = prompt_ids([prompt], self.tokenizer, chat)[0]
            wrapped = bool(getattr(self.tokenizer, "chat_template", None)) if chat is None else chat
            if self._mask in ids and (wrapped or not isinstance(prompt, str)):
                raise RCDError("a chat holds the mask; take it out, or give the answer's masks as the canvas.")
            return ids
        except TypeError as error:  # the tokenizer's own word for text that is no Unicode
            raise RCDError("the prompt holds characters that are no Unicode text (lone surrogates?).") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out; without a tokenizer, the ids themselves."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        with self._words:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_text(self, token: int) -> str | None:
        """A single token as text, a special one too; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        with self._words:
            return str(self.tokenizer.decode([token]))

    def encode_both(
        self, prompts: Prompts | None, chat: bool | None, canvas: Canvases
    ) -> tuple[list[list[int]], list[list[int]]]:
        """(every prompt, its canvas), as token ids; an empty canvas gives nothing. A prompt with masks ends before the
        first, and its canvas begins there. Without a prompt, or with an empty one, the canvas's first words are it."""
        mask = self._mask
        if prompts is None or (isinstance(prompts, str) and not prompts and canvas is not None):
            if canvas is None:
                raise RCDError("there is no prompt; give one, or a canvas that begins with words.")
            count = 1 if blanks.single(canvas) else len(canvas)
            both = [alone(self.canvas_ids(one), mask) for one in blanks.each(canvas, count)]
            return [prompt for prompt, _ in both], [rest for _, rest in both]
        if isinstance(prompts, (list, tuple)) and not prompts:
            raise RCDError("there is no prompt; give at least one, which is a text, token ids or chat messages.")
        rows = self.encode(prompts, chat)
        canvases = [[] if one is None else self.canvas_ids(one) for one in blanks.each(canvas, len(rows))]
        for number, row in enumerate(rows):
            if mask in row and not canvases[number]:
                rows[number], canvases[number] = split(row, mask)
            elif not row:
                rows[number], canvases[number] = alone(canvases[number], mask)
        return rows, canvases

    def canvas_ids(self, canvas: Canvas) -> list[int]:
        """A canvas as token ids."""
        if not isinstance(canvas, str):
            return blanks.token_ids(canvas)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RCDError("this checkpoint has no tokenizer; give the canvas as token ids.")
        try:
            with self._words:
                most = self.checkpoint.model.settings.context_length
                return blanks.read(canvas, blanks.Spelling(tokenizer), self._mask, most)
        except TypeError as error:
            raise RCDError("the canvas holds characters that are no Unicode text (lone surrogates?).") from error

    def stops(self, config: DecodeConfig) -> dict[str, Any]:
        """A stop string that is a special token, which no text shows, ends the answer as a token."""
        if not config.stop or self.tokenizer is None:
            return {}
        with self._words:
            return {"stop_ids": stop_tokens(config, self.tokenizer, self._mask)}
