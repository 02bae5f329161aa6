"""From prompts to token ids.

Knows the tokenizer and chat templates. Does not know where prompts come from.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .errors import CommandError, PromptError
from .prompts import Prompt


def read_template(file: str | None) -> str | None:
    """
    A chat template.

    Args:
        file (`str`, *optional*): A Jinja file.

    Raises:
        `CommandError`: If it cannot be read.
    """
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--chat-template {file} cannot be read: {error.strerror}.") from error


class Encoder:
    """
    From prompts to token ids.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        chat (`bool`): Whether plain texts are sent through the chat template.
        template (`str`, *optional*): A template in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool, template: str | None = None):
        self.tokenizer = tokenizer
        self.chat = chat
        self.template = template

    def check(self, has_chats: bool) -> None:
        """
        Args:
            has_chats (`bool`): Whether there are prompts that are chats.

        Raises:
            `CommandError`: If a template is needed and there is none.
        """
        wanted = self.chat or has_chats
        if wanted and self.template is None and self.tokenizer.chat_template is None:
            raise CommandError("the tokenizer has no chat template: pass one with --chat-template FILE.")

    def __call__(self, prompt: Prompt) -> list[int]:
        """
        Raises:
            `PromptError`: If the prompt cannot be served.
        """
        if prompt.error is not None:
            raise PromptError(prompt.error)
        messages = prompt.content
        if isinstance(messages, str):
            if not messages:
                raise PromptError("the prompt is empty")
            if not self.chat:
                return self._tokens(messages, add_special_tokens=True)
            messages = [{"role": "user", "content": messages}]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program: it may raise anything about messages it does not like
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return self._tokens(text, add_special_tokens=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens = list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        if not tokens:
            raise PromptError("the prompt is empty")
        return tokens
