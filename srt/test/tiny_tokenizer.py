"""A tokenizer of single bytes, so that every character beyond ASCII is several tokens."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNK, BOS, EOS = 0, 1, 2
VOCAB_SIZE = 3 + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<s>{{ message.role }}:{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def make_tokenizer(*, chat_template: bool = True) -> Any:
    """The tokenizer; ids 0 to 2 are special, the other 256 are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": UNK, "<s>": BOS, "</s>": EOS}
    vocab |= {symbol: 3 + i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE if chat_template else None,
    )


def write_tokenizer(directory: Path, *, chat_template: bool = True) -> None:
    """Saves the tokenizer into a checkpoint directory."""
    make_tokenizer(chat_template=chat_template).save_pretrained(directory)
