"""A tokenizer trained in memory and models with as many ids, for tools that work on text."""

import copy

import kit
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


CORPUS = ["the cat sat on the mat", "a hat for the rat", "that cat", "what is two and two", "say it again"]
# Says who speaks, as the templates of real chat models do.
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE: 256 bytes, a few merges, a chat template. Pads at the left."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(CORPUS * 9, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<pad>", eos_token="<end>", padding_side="left", model_max_length=128
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


@pytest.fixture(scope="session")
def _talkative(tokenizer):
    return kit.tiny(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)


@pytest.fixture
def model(_talkative):
    """A target with the tokenizer's vocabulary, of this test's own: tools set hooks, adapters and doors on it."""
    return copy.deepcopy(_talkative)


@pytest.fixture
def draft(_talkative):
    """The target with noise: accepts some drafts and rejects others."""
    return kit.near(_talkative)


@pytest.fixture
def encoded(tokenizer):
    """Eight prompts of unequal lengths as one left-padded batch."""
    prompts = ["the cat", "a", "what is two and two", "say it", "that hat", "on", "the rat sat on a mat", "two cats"]
    return dict(tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False))
