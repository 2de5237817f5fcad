"""Which tokens of a tokenizer are special, and which of them end an answer."""

import logging
from typing import Any

from srt.errors import RequestError
from srt.managers.tokenizer import ChatOptions, render_chat

logger = logging.getLogger(__name__)

# Stands for an answer: a text that no template writes or changes.
_ANSWER = "Zqx9vAnswerZqx9v"


def special_token_texts(tokenizer: Any) -> dict[int, str]:
    """The texts of the tokens that `skip_special_tokens` leaves out, by id."""
    texts = {token: added.content for token, added in _added(tokenizer).items() if added.special}
    for token in getattr(tokenizer, "all_special_ids", ()):
        texts.setdefault(token, str(tokenizer.convert_ids_to_tokens(token)))
    return texts


def added_token_texts(tokenizer: Any) -> dict[int, str]:
    """The texts of all added tokens, special or not, by id."""
    return {token: added.content for token, added in _added(tokenizer).items()}


def end_token_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer by what the tokenizer says: its end-of-sequence token, and what its
    chat template writes after an answer (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>`).
    """
    eos = tokenizer.eos_token_id
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if isinstance(tokenizer.chat_template, str) and tokenizer.chat_template:
        ids |= _after_an_answer(tokenizer)
    return frozenset(ids)


def _after_an_answer(tokenizer: Any) -> set[int]:
    """The added token that follows an answer which is the last message: at once, or after white
    space.
    """
    messages = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_chat(tokenizer, messages, ChatOptions(add_generation_prompt=False))
    except RequestError as error:
        logger.info("the end of an answer cannot be read from the chat template: %s", error)
        return set()
    _, found, rest = text.rpartition(_ANSWER)
    rest = rest.lstrip()
    following = [
        (len(added.content), token)
        for token, added in _added(tokenizer).items()
        if found and added.content and rest.startswith(added.content)
    ]
    # Some templates begin the next message whether or not there is one.
    return {max(following)[1]} - {tokenizer.bos_token_id} if following else set()


def _added(tokenizer: Any) -> dict[int, Any]:
    """Added tokens by id."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return added
